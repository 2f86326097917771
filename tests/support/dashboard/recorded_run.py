"""Makes a run's folder with recordings of Sokoban, played at random or by a solver: real boards, made-up numbers."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash
from msgspec.structs import replace
from PIL import Image

from envs.boards.solver import solve
from envs.sokoban import build_env
from shared.recordings.episode_format import Array, ImageRef, RecordedEpisode, RecordedTurn, StepHeader, StepImages
from shared.recordings.reader import FOLDER, IMAGES
from shared.recordings.writer import StepWriter
from shared.spans import Span
from shared.trace_file import FOLDER as TRACES
from shared.trace_file import Source, write_trace
from shared.types import Ending, Sample

MOVES = ("Up", "Down", "Left", "Right")
ACTIONS, MAX_TURNS, GROUP = 2, 6, 4
HOSTILE = "<img src=x onerror=alert(1)><script>document.title='owned'</script>"
NOW = 1_790_000_000.0


def make_run(
    folder: Path,
    *,
    steps: int = 40,
    recorded: tuple[int, ...] = (10, 20),
    groups: int = 4,
    evaluated: tuple[int, ...] = (),
) -> Path:
    """Make a run of `steps` steps. The steps in `recorded` have recordings of `groups` groups of four; the steps in
    `evaluated` are followed by a recorded evaluation."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(steps, sorted(recorded))))
    recipe = {"run": {"name": folder.name}, "learner": {"total_steps": steps, "optimizer": {"lr": 3e-4}}}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    for step in range(20, steps + 1, 20):
        (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (folder / "learner.log").write_text(f"12:00:00 learner INFO step 1\n12:00:01 learner WARNING {HOSTILE}\n")
    (folder / FOLDER / IMAGES).mkdir(parents=True)
    for step in recorded:
        record(folder / FOLDER, step, groups)
    for step in evaluated:
        record(folder / FOLDER, step, groups, f"step_{step}")
    if not recorded:
        return folder
    alarm = {
        "time": NOW + 900, "step": max(recorded), "rule": "truncated", "level": "critical",
        "message": "episodes run out of turns", "cause": "the policy walks in circles", "values": {"share": 0.4},
        "look_at": "rollout/ending/max_turns", "cure": "raise env.max_turns", "episodes": [f"{max(recorded)}-0/1"],
    }  # fmt: skip
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    return folder


def rows(steps: int, evaluated: list[int]) -> Iterator[dict[str, float]]:
    rng = random.Random(0)
    for step in range(1, steps + 1):
        success = 1 / (1 + math.exp(-(step - steps / 2) * 6 / steps)) * 0.9 + rng.uniform(-0.05, 0.05)
        yield {
            "step": step, "time": NOW + 30 * step, "rollout/reward": 2 * success - 1, "rollout/success": success,
            "rollout/ending/completed": success, "rollout/ending/max_turns": 1 - success, "policy_version": step,
            "policy/entropy": 1 - success / 2, "policy/entropy/lag_0": 0.6, "policy/entropy/lag_1": 0.5,
            "behaviour/kl": 1e-3, "optim/grad_norm": rng.uniform(0.3, 0.9), "speed/turns_per_s": 50.0,
            "learner/idle_frac": 0.04, "actors/idle_frac": 0.3, "time/step_s": 30.0, "progress/minutes": step / 2,
            "progress/episodes": 64.0 * step, "publish/seconds": 0.4, "publish/broadcast_s": 0.1, "publish/load_s": 0.3,
            "tickets/issued": 16.0 * step, "tickets/trained": 15.0 * step, "tickets/open": 20.0,
            "wire/rejected/schema_version": 2.0, "wire/rejected": 2.0, "actors/known": 2.0, "publish/engines": 1.0,
        }  # fmt: skip
        if step in evaluated:
            yield {"step": step, "time": NOW + 30 * step, "eval/success": success, "eval/reward": 2 * success - 1}


def record(folder: Path, step: int, groups: int, evaluation: str = "") -> None:
    """Write the recording of one step, or of an evaluation after it, half of whose episodes are recorded. The last
    group plays at random, and one episode's environment has raised an exception."""
    images: dict[str, bytes] = {}
    played = [
        play(images, step, group, index, skill=0.0 if group == groups - 1 else 0.35 * index)
        for group in range(groups)
        for index in range(GROUP)
    ]
    columns = ("logprob", "entropy", "value", "target", "advantage", "ratio", "clipped", "masked")
    header = StepHeader(step=step, version=step, time=NOW + 30 * step, run=folder.parent.name, columns=columns)
    if evaluation:
        played = [replace(each, ticket_id=f"{evaluation}/{each.ticket_id}", columns={}) for each in played]
        metrics = {"success": 0.75, "reward": 0.5, "turns": 4.0, "failed": 0.0}
        header = replace(header, evaluation=evaluation, played=2 * len(played), metrics=metrics, columns=())
    writer = StepWriter(folder, header, StepImages(names=tuple(images)))
    for name, data in images.items():
        (folder / IMAGES / name).write_bytes(data)
    for episode in played:
        writer.add(episode)
    writer.close()


def play(images: dict[str, bytes], step: int, group: int, index: int, skill: float) -> RecordedEpisode:
    """Play one episode; `skill` is the probability of the solver's move instead of a random one. The first of the third
    group has a window of two observations, so that later turns are segments."""
    rng = random.Random(f"{step} {group} {index}")
    env = build_env(sample=Sample(id=str(group), metadata={"seed": group}), args={"max_turns": MAX_TURNS})
    observation, _ = env.reset()
    pieces, mask, turns, refs, done, rewards = ["<|im_start|>", "system\n"], [0, 0], [], [], False, []
    at, segments = 0.0, list[int]()
    while not done and len(turns) < MAX_TURNS:
        first = len(refs)
        message = env.format_observation(observation)
        seen = ["<|im_start|>", "user\n"]
        if (group, index) == (2, 0) and len(turns) > 1:
            segments.append(len(pieces))
            refs.append(refs[-1])
            seen = [*pieces[:2], *seen, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", *seen]
        for part in message["content"]:
            if part["type"] == "image":
                refs.append(kept(images, part["image"]))
                seen += ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
            else:
                seen += [f"{word} " for word in part["text"].split(" ")]
        pieces += seen
        moves = solve(env.position) or list(MOVES)
        said = [m if rng.random() < skill else rng.choice(MOVES) for m in (moves + moves)[:ACTIONS]]
        answer = ["<", "answer", ">", *(word for move in said for word in (move, ", ")), "</", "answer", ">"]
        observation, done, info = env.step("".join(answer))
        rewards.append(float(info.get("reward", 0.0)))
        mask += [0] * len(seen) + [1] * len(answer)
        start, pieces = len(pieces), pieces + answer
        seconds = rng.uniform(0.2, 1.2)
        turns.append(
            RecordedTurn(
                start=start, end=len(pieces), reward=rewards[-1], seen="".join(seen), answer="".join(answer),
                first_image=first, last_image=len(refs), begin_s=at, generate_s=seconds, env_s=0.05,
                info=json.dumps({"moves": len(said), "note": HOSTILE if group == 0 else "played"}),
            )
        )  # fmt: skip
        at += seconds + 0.1
    success = float(env.success)
    broken = group == 1 and index == 0
    episode = finished(step, group, index, pieces, mask, turns, refs, sum(rewards), success, broken, rng)
    return replace(episode, segments=tuple(segments))


def finished(step, group, index, pieces, mask, turns, refs, reward, success, broken, rng) -> RecordedEpisode:  # type: ignore[no-untyped-def]
    masks = np.array(mask, dtype=np.uint8)
    number = int(masks.sum())
    noise = np.array([rng.random() for _ in range(number)], dtype=np.float32)
    logprobs = -2 * noise**3
    behaviour = np.zeros(len(mask), np.float32)
    behaviour[masks == 1] = logprobs + 0.01 * noise
    advantage = (2 * success - 1) * (0.2 + noise)
    columns = {
        "logprob": logprobs, "entropy": 1.5 * noise, "value": np.linspace(0.6, success, number) - 0.3 * noise,
        "target": np.full(number, reward), "advantage": advantage, "ratio": np.exp(-0.01 * noise),
    }  # fmt: skip
    flags = {"clipped": (noise > 0.97).astype(np.uint8), "masked": np.zeros(number, np.uint8)}
    return RecordedEpisode(
        ticket_id=f"{step}-{group}", index=index, group_size=GROUP, actor="host#1", seed=group,
        sample_id=f"board {group}",
        token_ids=Array.of(np.arange(len(mask), dtype=np.int32)), loss_mask=Array.of(masks),
        behaviour_logprobs=Array.of(behaviour), pieces=tuple(pieces), turns=tuple(turns), images=tuple(refs),
        policy_versions=Array.of(np.where(masks == 1, step - index % 3, -1).astype(np.int32)), reward=reward,
        metrics={"success": success, "moves": float(2 * len(turns))}, started=NOW + 30 * step + rng.uniform(0, 5),
        ending=Ending.ENV_ERROR if broken else Ending.COMPLETED if success else Ending.MAX_TURNS, group_s=9.0,
        error=f"RuntimeError: {HOSTILE}" if broken else "",
        columns={} if broken else {k: Array.of(v.astype(np.float32)) for k, v in columns.items()}
        | {k: Array.of(v) for k, v in flags.items()},
    )  # type: ignore[arg-type]  # fmt: skip


def kept(images: dict[str, bytes], picture: Image.Image) -> ImageRef:
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    data = buffer.getvalue()
    ref = ImageRef(
        hash=xxhash.xxh3_128_hexdigest(data), format="png", width=picture.width, height=picture.height,
        bytes=len(data), tokens=(picture.width // 32) * (picture.height // 32),
    )  # fmt: skip
    images[ref.file_name] = data
    return ref


def make_trace(folder: Path, steps: tuple[int, int] = (10, 12)) -> Path:
    """Write a trace of some steps into a run's folder: a learner, an engine, and an actor with twelve episodes."""
    spans: list[Span] = []
    for n, step in enumerate(range(steps[0], steps[1] + 1)):
        begin = 100.0 + n
        spans += [
            Span("wait for groups", begin, begin + 0.2),
            Span("step", begin + 0.2, begin + 0.9, note=f"{step} 7-a"),
        ]
        spans += [Span("forward", begin + 0.25, begin + 0.5), Span("backward", begin + 0.5, begin + 0.85)]
    group = [Span("group", 99.0, 100.1, track="group", note="7-a")]
    for index in range(12):
        track, begin = f"episode {index}", 99.0 + index / 100
        group += [Span("episode", begin, 100.0, track=track, note=HOSTILE), Span("turn", begin, 99.9, track=track)]
        group.append(Span("decode", begin + 0.1, 99.8, place=f"engine {HOSTILE}", track=track))
    sources = [Source("learner rank 0", spans, keeps_tracks=True), Source(f"actor {HOSTILE}", group, whole=True)]
    path = folder / TRACES / f"steps_{steps[0]:08d}_{steps[1]:08d}.json.gz"
    write_trace(path, sources, (100.0, 100.0 + steps[1] - steps[0] + 1), {"steps": list(steps), "lost_spans": 2})
    return path
