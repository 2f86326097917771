"""Adapters that come alone to SGLang's server: merged into the weights in its model's files (pronk_staged_weights).

SGLang's own routes for adapters serve the base to requests that do not name one, take a new adapter under a new name
alone, end an old one only when no request uses it, tell neither its checksum nor a version, and know no linears but the
decoder's. Merged, an adapter is a version of the weights as any other. The base is read from the files each time: it
costs no memory, and what was loaded meanwhile is no part of it.

Goes when SGLang takes an adapter in place, with a version.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def _of_pronk(path: str) -> Any:
    """A module of the repository that imports nothing else of it; its packages are not on the server's path."""
    spec = importlib.util.spec_from_file_location(f"pronk_{Path(path).stem}", ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


names = _of_pronk("shared/weights/adapters.py")


class MergedAdapter:
    """Iterates over (name, weight) as often as it is asked to, one weight at a time."""

    def __init__(self, tensors: dict[str, Any], base: ModelFiles, device: str, dtype: Any) -> None:
        """ValueError for half an adapter, for what is no part of one, and for a weight that the files do not have."""
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
            turned = weight.ndim == 3  # stacks of experts are [experts, in, out] in published files
            a, b = (self._placed(self._tensors[factor]) for factor in names.factor_names(name))
            whole = merged(weight.mT.contiguous() if turned else weight, a, b, scale)
            yield name, whole.mT if turned else whole

    def _placed(self, tensor: Any) -> Any:
        """A copy: it begins at a whole address, as the learner's does."""
        return tensor.to(self._device, self._dtype, copy=True)


class ModelFiles:
    """Weights of a model's folder by their names there. ValueError if there are none."""

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
    """What is to be loaded: the buckets of weights as they are, those of an adapter merged. ValueError, as above."""
    tensors = {name: tensor for bucket in buckets for name, tensor in bucket}
    if not any(map(names.is_of_adapter, tensors)):
        return buckets
    config = runner.model_config
    return [MergedAdapter(tensors, ModelFiles(config.model_path), runner.device, config.dtype)]
