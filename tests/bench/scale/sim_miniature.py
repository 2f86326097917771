"""Bounds of a loop's throughput, and a smaller loop that is simulated in place of a large one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from learner.plan.memory_use import Setting
from tests.bench.scale.draws import Drawn
from tests.bench.scale.sim_records import Loop


@dataclass(frozen=True, slots=True)
class Bounds:
    """Episodes a second of a learner that never waits, and of engines that never do."""

    learner: float
    engines: float

    @property
    def least(self) -> float:
        return min(self.learner, self.engines)


def bounds(loop: Loop) -> Bounds:
    """Return the throughput of learner and engines alone. Engines are as full as `max_staleness` lets them be, with
    requests alone: what environments take lowers that."""
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
    """Return a loop with fewer engines and as many groups for each, and how many of it make the whole. `most_episodes`:
    of its step. The longest of its episodes are as long as those of the whole only where lengths are cut."""
    episodes = loop.groups_per_step * loop.group_size
    engines = max(1, min(loop.engines, loop.engines * most_episodes // episodes))
    groups = max(1, round(loop.groups_per_step * engines / loop.engines))
    return replace(loop, engines=engines, groups_per_step=groups), loop.groups_per_step / groups


def learner_setting(setting: Setting, gpus: int) -> Setting:
    """Return the setting of a learner of so many GPUs, as its memory is judged: one copy in shards on all of them."""
    return replace(setting, gpus=gpus, context=1, expert=1, shard_size=0)
