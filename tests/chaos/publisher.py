"""A learner that is not the run's: gives an engine the run's first weights, under their old name, or weights that are
not finite, under the name of the newest.

    python -m tests.chaos.publisher --engine URL --model FOLDER --name 0-1f0c9a2b [--not-finite]

Ends with 1 and the reason if the engine did not take them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from learner.weights.engine_link import EngineLink
from learner.weights.gathering import buckets
from learner.weights.weight_group import WeightGroupManager
from learner.weights.weight_update import PhaseSeconds, WeightUpdate
from shared.engine.engine_api import EngineError

LIMIT_S = 10.0
BUCKET_BYTES = 2**28


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True, metavar="URL")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="its first weights")
    parser.add_argument("--name", required=True, help="what they are called")
    parser.add_argument("--not-finite", action="store_true", help="with one number that is none")
    options = parser.parse_args()
    weights = load_file(options.model / "model.safetensors")
    if options.not_finite:
        next(iter(weights.values())).view(-1)[0] = float("nan")
    if reason := publish(options.engine, options.name, weights):
        print(reason, file=sys.stderr)
        return 1
    return 0


def publish(url: str, name: str, weights: dict[str, torch.Tensor]) -> str:
    """As the learner does it, to one engine. Why that did not take the weights, or nothing."""
    link, manager = EngineLink(), WeightGroupManager("gloo", LIMIT_S)
    try:
        client = link.client(url)
        members = {client: link.run(client.server_info(LIMIT_S))}
        update = WeightUpdate(link, manager, members, name, PhaseSeconds(), "in_place", LIMIT_S, {})
        link.run(update.begin())
        for bucket in buckets(weights.items(), torch.float32, BUCKET_BYTES):
            if update.working:
                link.run(update.send(bucket))
        link.run(update.end())
        link.run(manager.shutdown())
    except EngineError as error:
        return str(error)
    finally:
        link.close()
    return "; ".join(update.failed.values())


if __name__ == "__main__":
    sys.exit(main())
