"""The kinds of inference engines that a recipe may name: what each can do, and which module starts it.

A kind has a name in `ENGINE_KINDS`, or is the dotted path of a module on the Python path. Its module holds
`ENGINE`, a `launch.engines.kinds.engine_kind.EngineKind`; a module that is named by its path holds `CAPABILITIES` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from shared.util.import_failures import import_failure

DEFAULT_KIND = "embedded"


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What a recipe may ask of a kind of engine. `module` is the dotted path of the module that starts one; empty if
    the kind's name is that path."""

    module: str = ""
    spans_gpus: bool = False  # one engine may compute on several GPUs: engine.tensor_parallel
    stages_adapters: bool = False  # what stages weights also receives adapters sent without weights


ENGINE_KINDS = {
    "embedded": EngineCapabilities("launch.engines.kinds.embedded_engine"),
    "sglang": EngineCapabilities("launch.engines.kinds.sglang_engine", spans_gpus=True, stages_adapters=True),
}


def capabilities_of(kind: str) -> EngineCapabilities:
    """Return what engines of this kind can do. Raise ValueError for an unknown kind, with the known ones, or if the
    module has no CAPABILITIES."""
    if kind in ENGINE_KINDS:
        return ENGINE_KINDS[kind]
    capabilities = getattr(_module_at(kind), "CAPABILITIES", None)
    if not isinstance(capabilities, EngineCapabilities):
        raise ValueError(f"engine.kind = {kind!r}: the module has no CAPABILITIES; give it an EngineCapabilities")
    return capabilities


def module_of(kind: str) -> ModuleType:
    """Import the module that starts engines of a kind. Raise ValueError, in one line, if there is no such kind, or if
    a module that is named by its path fails while it is imported."""
    return import_module(ENGINE_KINDS[kind].module) if kind in ENGINE_KINDS else _module_at(kind)


def _module_at(kind: str) -> ModuleType:
    """Import the module that a kind names by its path. Raise ValueError, in one line, if there is none or it fails."""
    unknown = (
        f"engine.kind = {kind!r}: there is no such engine; known are {', '.join(ENGINE_KINDS)}; of your own, "
        "give the dotted path of its module (docs/how-to/extend.md)"
    )
    if not all(part.isidentifier() for part in kind.split(".")):
        raise ValueError(unknown)
    try:
        return import_module(kind)
    except Exception as error:  # whatever the module raises while it is imported
        if isinstance(error, ModuleNotFoundError) and f"{kind}.".startswith(f"{error.name}."):
            raise ValueError(unknown) from error
        raise ValueError(
            f"engine.kind = {kind!r}: its module fails while it is imported ({import_failure(error)}); mend it"
        ) from error
