"""An engine that shares its GPU with the learner: how much room its episodes have.

SGLang sizes its cache by what is free when it starts, which depends on how far the learner has come by then. So the
cache is given in tokens, from the engine's share of the whole GPU, and SGLang may take them from all that is free.
"""

from __future__ import annotations

from typing import Any

from launch.task_run.tasks import sizes_of_model
from learner.model.duration import LEAST_EPISODES, Engines
from learner.model.memory import DTYPE_BYTES
from shared.config import ConfigError, Recipe

FREE_FRACTION = 0.9  # of what is free when the engine starts: what it may take for the tokens that it is given


def shared_flags(recipe: Recipe, gpu_bytes: float) -> dict[str, Any]:
    """SGLang's flags for its share of a GPU of so many bytes. ConfigError if that is too small."""
    model, engine = recipe.model, recipe.engine
    share = Engines.sharing(gpu_bytes, engine.mem_fraction, engine.max_batch, DTYPE_BYTES[model.dtype])
    tokens = share.cache_tokens(sizes_of_model(model.path))
    if tokens < LEAST_EPISODES * model.max_context:
        raise ConfigError(
            f"engine.mem_fraction = {engine.mem_fraction} of {gpu_bytes / 1e9:.0f} GB leaves room for {max(0, tokens)} "
            f"tokens of episodes beside the weights, fewer than {LEAST_EPISODES} of model.max_context = "
            f"{model.max_context}; raise it, or lower model.max_context"
        )
    return {"mem-fraction-static": FREE_FRACTION, "max-total-tokens": tokens}
