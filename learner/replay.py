"""Recomputes the learner's columns of recorded episodes with any checkpoint or model, and compares them with those of
the engines:

python -m learner.replay RUN/recordings/step_00000010.rec [--checkpoint RUN/checkpoints/step_00000009 | MODEL]

RECORDING is a .rec file, or a run's folder: for all of its steps with --checkpoint, else for the newest step that was
sampled from weights which are still there. Without --checkpoint these weights are taken: a checkpoint's, or those that
the run began with. Differences at their version are the mismatch of engine and learner; at other versions they also
include what the policy has learnt in between. The last line says whether the model was the same, the one before has all
results as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError

from learner.batch.episodes import make_episode
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.checkpoints.checkpoint_folder import list_checkpoints, step_of
from learner.checkpoints.restoring import check_base
from learner.checkpoints.trainer_state import trained
from learner.checkpoints.wholeness import check_files, read_meta
from learner.distributed import Ranks, close_ranks, init_ranks
from learner.model.lora_attach import attach
from learner.model.lora_base import base_hash
from learner.model.policy import Policy, load_policy
from learner.model.sharding import forward_only, parallelize
from learner.objective.objectives import loss_of
from learner.recording.column_names import as_arrays
from learner.recording.mismatch import Mismatch
from learner.recording.recorded_columns import recorded_columns
from learner.training.token_inputs import make_tokens
from shared.config.learner_section import LearnerConfig
from shared.config.lora_section import LoraConfig
from shared.config.objective_section import ObjectiveConfig
from shared.config.recipe import fail
from shared.recordings.episode_format import ColumnName, RecordedEpisode, StepHeader
from shared.recordings.reader import FOLDER, SUFFIX, RecordingError, episodes, read_image, read_step, steps
from shared.types import Image, Trajectory, Turn
from shared.util.own_commands import called_as
from shared.vision import VisionSpec
from shared.wire.codec import TokenRules, check_trajectory


@dataclass(slots=True)
class Replayed:
    mismatch: Mismatch
    skipped: Counter[str]  # number of episodes for which no columns can be computed, by reason
    damages: list[str]
    version: int | None = None  # of the weights; None = not known
    dtype: str = "float32"
    weights: str = ""  # where they are from

    def verdict(self) -> str:
        return self.mismatch.verdict(self.version, self.dtype)


def replay(recording: Path, ranks: Ranks, checkpoint: str = "") -> Replayed:
    """Recompute the columns of recorded episodes and compare. Raise ValueError if the recording, model or checkpoint is
    missing, or they do not fit."""
    paths = [recording] if recording.suffix == SUFFIX else steps(recording) or steps(recording / FOLDER)
    if not paths:
        raise ValueError(f"{recording} holds no recordings; give RUN, RUN/recordings or one of its step_*{SUFFIX}")
    if not checkpoint:
        paths, checkpoint = nearest(paths)
    header = read_step(paths[0]).header
    policy = policy_of(checkpoint, header, ranks)
    decoder, weights = ImageDecoder(policy.spec), checkpoint or header.model
    result = Replayed(Mismatch(), Counter(), [], version_of(checkpoint), header.dtype, weights)
    for path in paths:
        _replay_step(path, policy, decoder, ranks, result)
    if not result.mismatch.episodes:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in result.skipped.items()) or "they hold no episode"
        raise ValueError(f"nothing of {recording} can be replayed: {reasons}")
    return result


def version_of(checkpoint: str) -> int | None:
    """Return the version under which engines had a checkpoint's weights, 0 for those that a run began with (""); None
    if it is not known, or if they were never published."""
    if not checkpoint:
        return 0
    try:
        meta = json.loads((Path(checkpoint) / "meta.json").read_text())
        every = int(meta["recipe"]["learner"]["publish"]["every"])
        return int(meta["version"]) if step_of(Path(checkpoint)) % every == 0 else None
    except (OSError, ValueError, ArithmeticError, KeyError, TypeError, RecursionError):
        return None


def nearest(paths: list[Path]) -> tuple[list[Path], str]:
    """Return (the recording to replay, the checkpoint with the weights from which it was sampled, "" for those that the
    run began with): the newest such pair, or the pair with the least lag."""
    folder = paths[0].resolve().parent.parent / "checkpoints"
    weights = [*reversed(list_checkpoints(folder)), ""]
    versions = [(version, str(each)) for each in weights if (version := version_of(str(each))) is not None]
    pairs = []
    for order, path in enumerate(paths):
        for version, checkpoint in versions:
            sampled = [s for s in read_step(path).summaries if s.newest >= 0]
            lag = min((max(s.oldest - version, version - s.newest, 0) for s in sampled), default=sys.maxsize)
            pairs.append((lag, -order, -version, path, checkpoint))
    _, _, _, path, checkpoint = min(pairs)
    return [path], checkpoint


def _replay_step(path: Path, policy: Policy, decoder: ImageDecoder, ranks: Ranks, result: Replayed) -> None:
    header = read_step(path).header
    objective = objective_of(header, path)
    for episode in episodes(path, result.damages):
        try:
            columns = columns_of(episode, path.parent, policy, decoder, header.temperature or 1.0, objective, ranks)
        except ValueError as error:
            result.skipped[str(error)[:300]] += 1
        else:
            result.mismatch.add(episode, header.step, columns)


def objective_of(header: StepHeader, path: Path) -> ObjectiveConfig:
    try:
        return ObjectiveConfig.model_validate_json(header.objective)
    except ValidationError as error:
        reason = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
        raise RecordingError(f"{path} has an objective that this Pronk does not know: {reason}") from None


def policy_of(checkpoint: str, header: StepHeader, ranks: Ranks) -> Policy:
    """Load a policy with the weights of a checkpoint or a model's folder; without `checkpoint`, those of the model that
    the run began with."""
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
    episode: RecordedEpisode,
    folder: Path,
    policy: Policy,
    decoder: ImageDecoder,
    temperature: float,
    objective: ObjectiveConfig,
    ranks: Ranks,
) -> dict[ColumnName, np.ndarray]:
    """Compute an episode's columns, [K] each, by a forward of this episode only. Raise ValueError if the episode is not
    of this model or has no sampled token."""
    trajectory = trajectory_of(episode, folder)
    vocab_size = policy.vlm.config.get_text_config().vocab_size
    check_trajectory(trajectory, TokenRules(policy.spec.image_token_id, policy.banned_ids, vocab_size))
    recorded = episode.columns.get("advantage")
    played = make_episode(trajectory, 0.0, decoder, objective)
    if recorded is not None:
        played = replace(played, turn_advantages=recorded.numpy().astype(np.float32))
    batch = pack([played], decoder, ranks.device)
    output = forward_only(policy, batch, temperature)
    proximal = output.logprobs if objective.proximal == "learner" else None
    tokens = make_tokens(batch, output, None, proximal, torch.ones_like(batch.rewards))
    columns = recorded_columns(tokens, loss_of(tokens, objective))
    return as_arrays(columns.cpu().numpy(), group_relative=objective.is_group_relative)


def trajectory_of(episode: RecordedEpisode, folder: Path) -> Trajectory:
    """Return an episode's trajectory as the learner had it. Raise ValueError if an image is missing."""
    return Trajectory(
        token_ids=episode.token_ids.numpy(),
        loss_mask=episode.loss_mask.numpy(),
        behaviour_logprobs=episode.behaviour_logprobs.numpy(),
        policy_versions=episode.policy_versions.numpy(),
        turns=tuple(Turn(turn.start, turn.end, turn.reward) for turn in episode.turns),
        reward=episode.reward,
        images=tuple(Image(read_image(folder, image), image.hash) for image in episode.images),
        ending=episode.ending,
        segments=episode.segments,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=called_as("python -m learner.replay"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recording", type=Path, metavar="RECORDING")
    parser.add_argument("--checkpoint", default="", help="a checkpoint's folder, or a model's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(argv)
    try:
        result = replay(options.recording, init_ranks(options.device), options.checkpoint)
    except (ValueError, OSError) as error:
        return fail(error)
    finally:
        close_ranks()
    tell(result)
    return 0


def tell(result: Replayed) -> None:
    for reason, count in result.skipped.items():
        print(f"{count} episodes are left out: {' '.join(reason.split())}", file=sys.stderr)
    for line in result.damages:
        print(line, file=sys.stderr)
    print(f"with the weights of {result.weights}")
    print("\n".join(result.mismatch.lines()))
    left_out = {"skipped": result.skipped.total(), "damaged": len(result.damages)}
    verdict = result.verdict()
    print(json.dumps(result.mismatch.as_dict() | left_out | {"weights": result.weights, "verdict": verdict}))
    print(verdict)


if __name__ == "__main__":
    sys.exit(main())
