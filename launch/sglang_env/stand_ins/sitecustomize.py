"""Schemas of torchvision's compiled operators, for machines without an NVIDIA GPU.

torchvision's wheel is built for CUDA; its compiled half does not load beside a CPU torch, and its Python half then
fails on import because it registers fake kernels for operators that do not exist. SGLang needs the Python half alone.

Goes when torchvision is installed from a CPU build that matches torch.
"""

import torch

_library = torch.library.Library("torchvision", "DEF")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
