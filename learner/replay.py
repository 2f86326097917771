"""Computes the learner's columns of recorded episodes anew, with any checkpoint or model, and tells how far they are
from what the engines said:

python -m learner.replay RUN/recordings/step_00000010.rec [--checkpoint RUN/checkpoints/step_00000009 | MODEL]

RECORDING is a .rec file, or a run's folder for all of its steps. Without --checkpoint it takes the model that the run
began with. The last line is the same as one JSON object. What differs at lag 0 is the mismatch of engine and learner;
at later versions it is also what the policy has learnt since.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from learner.batch import Microbatch, make_episode, pack
from learner.checkpoints.restoring import check_base
from learner.checkpoints.state import trained
from learner.checkpoints.wholeness import check_files, read_meta
from learner.distributed import Ranks, close_ranks, init_ranks
from learner.images import ImageDecoder
from learner.lora.attach import attach
from learner.lora.base import base_hash
from learner.model.policy import Policy, load_policy
from learner.model.sharding import forward_only, parallelize
from learner.objective.objectives import loss_of
from learner.objective.records import Tokens
from learner.recording.columns import recorded_columns
from learner.recording.mismatch import Mismatch
from learner.recording.names import as_arrays
from shared.codec import TokenRules, check_trajectory
from shared.config import fail
from shared.learner_config import LearnerConfig
from shared.recordings.reading import FOLDER, SUFFIX, RecordingError, episodes, read_image, read_step, steps
from shared.recordings.records import ColumnName, Episode, StepHeader
from shared.settings.lora import LoraConfig
from shared.settings.objective import ObjectiveConfig
from shared.types import Image, Trajectory, Turn
from shared.vision import VisionSpec


@dataclass(slots=True)
class Replayed:
    mismatch: Mismatch
    skipped: Counter[str]  # episodes that no columns can be computed for, by the reason
    damages: list[str]


def replay(recording: Path, ranks: Ranks, checkpoint: str = "") -> Replayed:
    """ValueError: there is no recording, model or checkpoint, or they do not fit."""
    paths = [recording] if recording.suffix == SUFFIX else steps(recording) or steps(recording / FOLDER)
    if not paths:
        raise ValueError(f"{recording} holds no recordings; give RUN, RUN/recordings or one of its step_*{SUFFIX}")
    policy = policy_of(checkpoint, read_step(paths[0]).header, ranks)
    found, decoder = Replayed(Mismatch(), Counter(), []), ImageDecoder(policy.spec)
    for path in paths:
        _replay_step(path, policy, decoder, ranks, found)
    if not found.mismatch.episodes:
        told = ", ".join(f"{reason} ({count})" for reason, count in found.skipped.items()) or "they hold no episode"
        raise ValueError(f"nothing of {recording} can be replayed: {told}")
    return found


def _replay_step(path: Path, policy: Policy, decoder: ImageDecoder, ranks: Ranks, found: Replayed) -> None:
    header = read_step(path).header
    objective = objective_of(header, path)
    for episode in episodes(path, found.damages):
        try:
            columns = columns_of(episode, path.parent, policy, decoder, header.temperature or 1.0, objective, ranks)
        except ValueError as error:
            found.skipped[str(error)[:300]] += 1
        else:
            found.mismatch.add(episode, header.step, columns)


def objective_of(header: StepHeader, path: Path) -> ObjectiveConfig:
    try:
        return ObjectiveConfig.model_validate_json(header.objective)
    except ValueError as error:
        raise RecordingError(f"{path} has an objective that this Pronk does not know: {_one_line(error)}") from None


def policy_of(checkpoint: str, header: StepHeader, ranks: Ranks) -> Policy:
    """With the weights of a checkpoint or a model's folder; without any, of the model that the run began with."""
    given = Path(checkpoint or header.model)
    meta: dict[str, Any] = {}
    if (given / "meta.json").exists():
        meta = read_meta(given, ranks)
        check_files(given, meta, ranks)
    objective = meta["recipe"]["learner"]["objective"] if meta else {}
    model = Path(meta["recipe"]["model"]["path"] if meta else given)
    if not (model / "config.json").exists():
        raise ValueError(
            f"{str(model)!r} is no folder of a model: give one, or a checkpoint like checkpoints/step_00000050, with "
            "--checkpoint"
        )
    bounds = {"min_pixels": header.min_pixels, "max_pixels": header.max_pixels}
    policy = load_policy(str(model), VisionSpec.load(model, **bounds), int(objective.get("critic_width", 0)))
    lora = LoraConfig(**meta["recipe"]["learner"].get("lora", {})) if meta else LoraConfig()
    if lora.on:
        policy.adapters = attach(policy.vlm, lora, getattr(torch, meta["recipe"]["model"]["dtype"]))
        policy.adapters.base = base_hash(policy.vlm, str(model))
        check_base(given, meta, policy, str(model))
    if meta:
        dcp.load({"model": trained(policy, policy.state_dict())}, checkpoint_id=str(given / "dcp"))  # in place
    parallelize(policy, ranks, LearnerConfig(), torch.bfloat16 if header.dtype == "bfloat16" else torch.float32)
    return policy.eval()


def columns_of(
    episode: Episode,
    folder: Path,
    policy: Policy,
    decoder: ImageDecoder,
    temperature: float,
    objective: ObjectiveConfig,
    ranks: Ranks,
) -> dict[ColumnName, np.ndarray]:
    """[K] each, by a forward of the episode alone. ValueError if it is none of this model, or has no sampled token."""
    trajectory = trajectory_of(episode, folder)
    config = policy.vlm.config
    check_trajectory(trajectory, TokenRules(config.image_token_id, policy.banned_ids, config.text_config.vocab_size))
    recorded = episode.columns.get("advantage")
    advantage = float(recorded.numpy()[0]) if recorded is not None else 0.0
    batch = pack([make_episode(trajectory, advantage, decoder, objective)], decoder, ranks.device)
    output = forward_only(policy, batch, temperature)
    tokens = Tokens(
        logprobs=output.logprobs,
        entropies=output.entropies,
        values=output.values,
        proximal_logprobs=output.logprobs if objective.proximal == "learner" else None,
        weights=torch.ones_like(batch.rewards),
        **_told(batch),
    )
    columns = recorded_columns(tokens, loss_of(tokens, objective))
    return as_arrays(columns.cpu().numpy(), group_relative=objective.group_relative)


def _told(batch: Microbatch) -> dict[str, Any]:
    names = ("behaviour_logprobs", "rewards", "turn_end", "episode_end", "advantages")
    return {name: getattr(batch, name) for name in names}


def trajectory_of(episode: Episode, folder: Path) -> Trajectory:
    """As the learner had it. ValueError if an image is not there any more."""
    return Trajectory(
        token_ids=episode.token_ids.numpy(),
        loss_mask=episode.loss_mask.numpy(),
        behaviour_logprobs=episode.behaviour_logprobs.numpy(),
        policy_versions=episode.policy_versions.numpy(),
        turns=tuple(Turn(turn.start, turn.end, turn.reward) for turn in episode.turns),
        reward=episode.reward,
        images=tuple(Image(read_image(folder, image), image.hash) for image in episode.images),
        ending=episode.ending,
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, metavar="RECORDING")
    parser.add_argument("--checkpoint", default="", help="a checkpoint's folder, or a model's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(argv)
    try:
        found = replay(options.recording, init_ranks(options.device), options.checkpoint)
    except (ValueError, OSError) as error:
        return fail(error)
    finally:
        close_ranks()
    tell(found)
    return 0


def tell(found: Replayed) -> None:
    for reason, count in found.skipped.items():
        print(f"{count} episodes are left out: {' '.join(reason.split())}", file=sys.stderr)
    for line in found.damages:
        print(line, file=sys.stderr)
    print("\n".join(found.mismatch.lines()))
    left_out = {"skipped": found.skipped.total(), "damaged": len(found.damages)}
    print(json.dumps(found.mismatch.as_dict() | left_out))


if __name__ == "__main__":
    sys.exit(main())
