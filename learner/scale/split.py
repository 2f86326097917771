"""How many of all GPUs the learner should have and how many the engines.

Bounds tell where learner and engines are equally fast. A step also waits for its longest episode, which is over sooner
the fewer requests an engine has; so that split and several with more engines are simulated, in miniature.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from learner.model.duration import Speed
from learner.model.memory import Setting, memory
from learner.model.sizes import ModelSizes
from learner.scale.assumed import GPU_BYTES, SERVING, SPEED, Serving, engine_gpus, engine_speed, loop_of
from learner.scale.draws import Drawn
from learner.scale.records import Loop, Outcome
from learner.scale.simulation import simulate

SHARES = 32  # splits that are looked at, at most
SIMULATED, TOLD = 5, 3  # of these
MOST_EPISODES = 256  # of a miniature's step
STEPS, SKIP = 6, 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """Episodes a second of a learner that never waits, and of engines that never do."""

    learner: float
    engines: float

    @property
    def least(self) -> float:
        return min(self.learner, self.engines)


@dataclass(frozen=True, slots=True)
class Split:
    learner: int  # GPUs
    engines: int  # engines
    engine_gpus: int  # of each
    bounds: Bounds
    loop: Loop
    episodes_per_s: float  # simulated
    outcome: Outcome  # of the miniature

    def __str__(self) -> str:
        gpus = f" of {self.engine_gpus} GPUs" if self.engine_gpus > 1 else ""
        return (
            f"{self.learner} GPUs for the learner, {self.engines} engines{gpus}: {self.episodes_per_s:.2f} episodes/s "
            f"at max_staleness {self.loop.max_staleness} (learner alone {self.bounds.learner:.2f}, engines alone "
            f"{self.bounds.engines:.2f}), mean staleness {self.outcome.staleness:.1f}"
        )


def bounds(loop: Loop) -> Bounds:
    """Engines are as full as `max_staleness` lets them be, with requests alone: what environments take lowers that."""
    assert isinstance(loop.episodes, Drawn)
    episodes, engine = loop.episodes, loop.engine
    in_play = loop.groups_per_version * (loop.max_staleness + 1) * loop.group_size / loop.engines
    running = max(1, min(engine.max_batch, int(in_play)))
    turns, tokens = episodes.turns.mean, episodes.tokens.mean
    reading = episodes.prompt_tokens.mean * engine.prefill_s + turns * engine.turn_s
    alone = reading + tokens * engine.step_s(running) / running
    publication = loop.publication
    waits = publication.handover_s if publication.design == "relay" else publication.send_s + publication.load_s
    version_s = loop.publish_every * loop.step_s.mean + waits
    return Bounds(loop.groups_per_version * loop.group_size / version_s, loop.engines / alone)


def miniature(loop: Loop, most_episodes: int) -> tuple[Loop, float]:
    """A loop with fewer engines and as many groups for each, and how many of it make the whole. `most_episodes`: of its
    step. The longest of its episodes are as long as those of the whole only where lengths are cut."""
    episodes = loop.groups_per_step * loop.group_size
    engines = max(1, min(loop.engines, loop.engines * most_episodes // episodes))
    groups = max(1, round(loop.groups_per_step * engines / loop.engines))
    return replace(loop, engines=engines, groups_per_step=groups), loop.groups_per_step / groups


def learner_setting(setting: Setting, gpus: int) -> Setting:
    """Of a learner of so many GPUs, as the memory that it needs is judged: one copy in shards on all of them."""
    return replace(setting, gpus=gpus, context=1, expert=1, shard_size=0)


def splits(
    sizes: ModelSizes,
    setting: Setting,
    room: float,
    *,
    speed: Speed = SPEED,
    serving: Serving = SERVING,
    max_staleness: int = 1,
    group_size: int = 8,
    gpu_bytes: float = GPU_BYTES,
) -> list[Split]:
    """The best few of `setting.gpus` GPUs, best first; none where the learner fits into no part of them. `room`: bytes
    that a rank may use. ValueError: episodes of which engines can play none."""
    engine_speed(sizes, setting, speed, gpu_bytes, serving)  # refuses such episodes, whether or not a learner fits
    gpus = engine_gpus(sizes, setting, gpu_bytes, serving)
    how = {"speed": speed, "serving": serving, "max_staleness": max_staleness, "group_size": group_size}
    how["gpu_bytes"] = gpu_bytes
    found = []
    for learner in _learners(setting.gpus, gpus):
        each = learner_setting(setting, learner)
        if memory(sizes, each).total <= room:
            loop = loop_of(sizes, each, (setting.gpus - learner) // gpus, **how)  # type: ignore[arg-type]
            found.append((bounds(loop), learner, loop))
    judged = []
    for bound, learner, loop in _spread(found):
        small, times = miniature(loop, MOST_EPISODES)
        outcome = simulate(small, STEPS + max_staleness, skip=SKIP + max_staleness)
        judged.append(Split(learner, loop.engines, gpus, bound, loop, outcome.episodes_per_s * times, outcome))
    return sorted(judged, key=lambda split: -split.episodes_per_s)[:TOLD]


def _spread(found: list[tuple[Bounds, int, Loop]]) -> list[tuple[Bounds, int, Loop]]:
    """The one with the best bounds, and some with smaller learners, evenly."""
    if not found:
        return []
    top = max(range(len(found)), key=lambda index: found[index][0].least)
    return [found[index] for index in sorted({top * i // (SIMULATED - 1) for i in range(SIMULATED)})]


def _learners(gpus: int, of_engine: int) -> Iterator[int]:
    """GPUs of the learner: multiples of what an engine has, about SHARES of them."""
    step = of_engine * ceil(gpus / (of_engine * SHARES))
    yield from range(step, gpus - of_engine + 1, step)


def report(name: str, sizes: ModelSizes, setting: Setting, room: float, speed: Speed, gpu_bytes: float) -> str:
    """The best few, in words, with groups of 8; engines read their memory as fast as `speed` says. A setting knows the
    steps that may be held, so it is taken for one with a publication after each."""
    serving = replace(SERVING, memory_gb=speed.hbm, memory_share=speed.decode)
    bound = setting.steps_held - 1
    found = splits(sizes, setting, room, speed=speed, serving=serving, max_staleness=bound, gpu_bytes=gpu_bytes)
    head = f"{name}: {setting.gpus} GPUs for learner and engines, {setting.episodes} episodes a step"
    return "\n".join([head, *(f"  {split}" for split in found)] if found else [head, "  no split fits: use more GPUs"])
