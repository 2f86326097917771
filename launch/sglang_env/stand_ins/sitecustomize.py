"""Defines schemas of torchvision's compiled operators, for machines without an NVIDIA GPU.

torchvision's wheel is built for CUDA; its compiled part cannot be loaded with a CPU build of torch, and its Python part
then fails at import, because it registers fake kernels for operators that do not exist. SGLang needs only the Python
part.

To be removed when torchvision is installed from a CPU build that matches torch.
"""

import torch

_library = torch.library.Library("torchvision", "DEF")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
