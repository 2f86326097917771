"""A plugin of SGLang's server (its entry point group `sglang.srt.plugins`): images count within the server's bounds.

To keep a prompt's tokens as they were sent, SGLang puts as many tokens in an image's place as the image has. It counts
them by the bounds in the model's own preprocessor_config.json, whatever `--mm-process-config` says. Where the two
differ, as they do between a recipe's `model.min_pixels` and a published model's, the count is not what its processor
makes, and the server decodes the prompt and encodes it anew: it would continue other tokens than were sampled. Here it
counts by the bounds that it was given.

Goes when SGLang's count knows `--mm-process-config`.
"""

from __future__ import annotations

from typing import Any


def count(original: Any, processor: Any, images: Any) -> Any:
    """Stands around `resolve_image_token_counts`."""
    if size := (processor.image_config or {}).get("size"):
        own = processor._processor.image_processor
        if dict(own.size) != dict(size):
            own.size = type(own.size)(**size)
    return original(processor, images)


def register() -> None:
    """Called by SGLang in each of its processes, before it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    processor = "sglang.srt.multimodal.processors.base_processor.BaseMultimodalProcessor"
    HookRegistry.register(f"{processor}.resolve_image_token_counts", count, HookType.AROUND)
