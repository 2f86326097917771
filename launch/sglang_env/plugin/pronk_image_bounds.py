"""A plugin of SGLang's server (its entry point group `sglang.srt.plugins`): image tokens are counted with the server's
bounds.

To keep a prompt's tokens as they were sent, SGLang replaces an image's placeholder by as many tokens as the image has.
It counts these with the bounds in the model's own preprocessor_config.json, ignoring `--mm-process-config`. If the two
differ, as a recipe's `model.min_pixels` does from a published model's, the count differs from its processor's result;
then the server decodes the prompt and encodes it again, and would continue other tokens than those that were sampled.
With this plugin it counts with the given bounds.

To be removed when SGLang's count uses `--mm-process-config`.
"""

from __future__ import annotations

from typing import Any


def count(original: Any, processor: Any, images: Any) -> Any:
    """Wrap `resolve_image_token_counts`: set the image processor's size to the server's bounds first."""
    if size := (processor.image_config or {}).get("size"):
        own = processor._processor.image_processor
        if dict(own.size) != dict(size):
            own.size = type(own.size)(**size)
    return original(processor, images)


def register() -> None:
    """Register the hooks. SGLang calls this in each of its processes, before it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    processor = "sglang.srt.multimodal.processors.base_processor.BaseMultimodalProcessor"
    HookRegistry.register(f"{processor}.resolve_image_token_counts", count, HookType.AROUND)
