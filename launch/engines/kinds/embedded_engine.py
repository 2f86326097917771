"""The embedded engine: Pronk's own small server, run in the same environment as the learner and the actors."""

from __future__ import annotations

import sys

from launch.engines.kinds.engine_kind import EngineKind, EnginePlacement, EngineSpec, engine_env
from launch.engines.network import url_of
from shared.config.recipe import Recipe
from shared.keys import read_api_key

# An engine gives up a request later than its client does, so that the client reports the timeout.
AFTER_CLIENT_S = 10.0


class EmbeddedEngine(EngineKind):
    """`python -m actor.engine.server`."""

    def spec(self, recipe: Recipe, placement: EnginePlacement) -> EngineSpec:
        """Return how one server is started, on one GPU at most."""
        engine, model = recipe.engine, recipe.model
        flags = {
            "model-path": model.path,
            "port": placement.port,
            "host": engine.host,
            "device": engine.device,
            "dtype": model.dtype,
            "threads": engine.threads,
            "max-batch": engine.max_batch,
            "max-context": model.max_context,
            "min-pixels": model.min_pixels,
            "max-pixels": model.max_pixels,
            "weight-version": placement.weight_version,
            "update-timeout-s": recipe.learner.publish.timeout_s,
            "request-timeout-s": engine.request_timeout_s + AFTER_CLIENT_S,
        }
        if engine.device == "cuda" and engine.mem_fraction:
            flags["mem-fraction"] = engine.mem_fraction
        if engine.api_key_file:
            read_api_key(engine.api_key_file)  # raises now if the file cannot be used
            flags["api-key-file"] = engine.api_key_file
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        return EngineSpec(
            placement.name,
            url_of(engine.host, placement.port),
            (sys.executable, "-P", "-m", "actor.engine.server", *words),
            engine_env(recipe, placement.gpus),
            placement.gpus,
            shares_gpu=engine.shares_gpu,
        )


ENGINE = EmbeddedEngine()
