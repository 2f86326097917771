"""What a simulated run depends on, and what it came to. Names are those of a recipe where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from tests.bench.scale.draws import Draw, Episodes

Rule = Literal["tickets", "one_step_off"]
Design = Literal["paused", "staged", "relay"]


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Continuous batching: a step samples one token of each of n running requests in `token_s + n request_s`. A request
    that joins is read first, and all others stand still meanwhile."""

    token_s: float
    request_s: float
    prefill_s: float = 0.0  # of one prompt token
    turn_s: float = 0.0  # of one request, beside its tokens
    max_batch: int = 64  # requests that run at once; the others wait

    def step_s(self, running: int) -> float:
        return self.token_s + self.request_s * running


@dataclass(frozen=True, slots=True)
class Publication:
    """`paused`: engines stand still, and the learner waits, for `send_s`. `staged`: weights travel beside generation,
    then engines stand for `load_s`; the learner waits for both. `relay`: the learner goes on after `handover_s`, relays
    have the weights `send_s` later, and engines pull them and stand for `load_s`."""

    design: Design
    send_s: float
    load_s: float = 0.0
    handover_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Loop:
    """`one_step_off`: while one batch is trained on, the next is played as a whole; a publication waits for both."""

    episodes: Episodes
    engine: EngineSpeed
    publication: Publication
    step_s: Draw  # of an optimizer step, none of it waiting
    engines: int = 1
    group_size: int = 1
    groups_per_step: int = 64
    max_staleness: int = 1
    publish_every: int = 1
    groups_in_play: int = 0  # of all actors together; 0 = as many as the learner issues
    lease_s: float = inf  # after which a ticket is issued to another actor too; the first group counts
    rule: Rule = "tickets"

    @property
    def groups_per_version(self) -> int:
        return self.groups_per_step * self.publish_every


@dataclass(frozen=True, slots=True)
class Outcome:
    """Over the steps that are counted."""

    steps: int
    seconds: float
    episodes_per_s: float
    turns_per_s: float
    tokens_per_s: float  # sampled, of episodes that were trained on
    staleness: float  # versions, mean of all tokens
    max_staleness: int  # of a group's oldest token
    learner_busy: float  # share of the time in optimizer steps
    engines_busy: float  # share of the time in which an engine has requests and may compute, mean of all
    running: float  # requests that an engine computes at once, mean over engines and time
    reissued: int  # tickets whose lease was over

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps
