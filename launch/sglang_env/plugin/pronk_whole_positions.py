"""A plugin of SGLang's server (its entry point group `sglang.srt.plugins`): all tokens of a prompt for a GLM get
positions.

To keep a prompt's tokens as they were sent, SGLang replaces an image's placeholder by as many tokens as the image has.
For GLM it then computes positions with the mask of its processor's own text, which has one token for each image: the
lengths differ, and the request fails. With this plugin such a mask is left out, since a prompt holds no padding.

To be removed when SGLang computes a GLM's positions without the processor's mask.
"""

from __future__ import annotations

from typing import Any


def positions(original: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Wrap `get_rope_index_glm4v`: leave out a mask of another length than the tokens'."""
    input_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    fits = attention_mask is not None and attention_mask.shape == input_ids.shape
    return original(*args, attention_mask=attention_mask if fits else None, **kwargs)


def register() -> None:
    """Register the hooks. SGLang calls this in each of its processes, before it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    rotary = "sglang.srt.layers.rotary_embedding.MRotaryEmbedding"
    HookRegistry.register(f"{rotary}.get_rope_index_glm4v", positions, HookType.AROUND)
