"""The families of models that are trained, and how the published checkpoints of each name and lay out parameters.

transformers holds them otherwise: it renames what it loads, and turns the experts' matrices around. Engines are sent,
and an export holds, what the published checkpoints have.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """From transformers' model to the published checkpoint.

    `prefixes`: (as transformers begins a name, as the checkpoint does). `turned`: how names of stacks of matrices end
    that transformers holds as [experts, out, in] and the checkpoint as [experts, in, out].
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    turned: tuple[str, ...] = ()

    def published_name(self, name: str) -> str:
        """The checkpoint's name of the parameter that transformers calls `name`."""
        for own, published in self.prefixes:
            if name.startswith(own):
                return published + name.removeprefix(own)
        return name

    def is_turned(self, name: str) -> bool:
        """Whether the checkpoint holds this parameter, by either name, with its last two dimensions swapped."""
        return name.endswith(self.turned)


FAMILIES = {
    "qwen3_vl": Family(),
    "qwen3_vl_moe": Family(turned=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    "qwen2_5_vl": Family(prefixes=(("model.language_model.", "model."), ("model.visual.", "visual."))),
}
"""By config.json's model_type."""
