"""Merges adapters that are sent to SGLang's server without weights into the weights in its model's files
(pronk_staged_weights).

SGLang's own routes for adapters do not suffice: requests that name no adapter get the base model; a new adapter needs a
new name; an old one is unloaded only when no request uses it; there is neither a checksum nor a version; and only the
decoder's linear layers are supported. A merged adapter is a version of the weights like any other. The base weights are
read from the files each time: this takes no memory, and weights loaded meanwhile have no influence.

To be removed when SGLang replaces an adapter in place, with a version.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def _of_pronk(path: str) -> Any:
    """Load a module of the repository that imports no other module of it; the repository's packages are not on the
    server's path."""
    spec = importlib.util.spec_from_file_location(f"pronk_{Path(path).stem}", ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


names = _of_pronk("shared/engine/adapter_names.py")


class MergedAdapter:
    """The merged weights of an adapter: an iterable of (name, weight) that makes one weight at a time, and can be
    iterated repeatedly."""

    def __init__(self, tensors: dict[str, Any], base: ModelFiles, device: str, dtype: Any) -> None:
        """Collect an adapter's tensors. Raise ValueError for an incomplete adapter, for a tensor that is not part of
        one, and for a weight that is not in the files."""
        self._tensors, self._base, self._device, self._dtype = tensors, base, device, dtype
        self._names = [name for name in base.files if not {*names.factor_names(name)}.isdisjoint(tensors)]
        wanted = {names.SCALE, *(factor for name in self._names for factor in names.factor_names(name))}
        if wrong := sorted(wanted ^ tensors.keys()):
            raise ValueError(
                f"{wrong[0]} " + ("is missing" if wrong[0] in wanted else f"has no weight in {base.folder}")
            )

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        merged, scale = _of_pronk("kernels/low_rank.py").merged, float(self._tensors[names.SCALE])
        for name in self._names:
            weight = self._placed(self._base.read(name))
            transposed = weight.ndim == 3  # stacks of experts are [experts, in, out] in published files
            a, b = (self._placed(self._tensors[factor]) for factor in names.factor_names(name))
            sum_of_both = merged(weight.mT.contiguous() if transposed else weight, a, b, scale)
            yield name, sum_of_both.mT if transposed else sum_of_both

    def _placed(self, tensor: Any) -> Any:
        """Return a copy on the device, which is aligned in memory like the learner's tensor."""
        return tensor.to(self._device, self._dtype, copy=True)


class ModelFiles:
    """The weights in a model's folder, by their names there. The constructor raises ValueError if there are none."""

    def __init__(self, folder: str) -> None:
        from safetensors import safe_open

        self.folder = folder
        self.files: dict[str, Path] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self.files |= dict.fromkeys(file.keys(), path)
        if not self.files:
            raise ValueError(f"--model-path {folder} is no folder with weights in safetensors")

    def read(self, name: str) -> Any:
        from safetensors import safe_open

        with safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name)


def merged_with_base(buckets: list[Any], runner: Any) -> list[Any]:
    """Return the buckets to load: buckets of weights unchanged, those of an adapter merged. Raise ValueError as
    `MergedAdapter` and `ModelFiles` do."""
    tensors = {name: tensor for bucket in buckets for name, tensor in bucket}
    if not any(map(names.is_of_adapter, tensors)):
        return buckets
    config = runner.model_config
    return [MergedAdapter(tensors, ModelFiles(config.model_path), runner.device, config.dtype)]
