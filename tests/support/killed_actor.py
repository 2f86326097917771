"""An actor that is killed and restarted at each line of its standard input; the end of the input ends it.

python -m tests.support.killed_actor LEARNER FOLDER JOURNAL

Its engine tosses a coin at each turn, and has the policy version in FOLDER/version. The first toss decides whether the
episode is one or twenty turns long, and is written as a line to FOLDER/flips. Each toss in the n-th process appends a
byte to FOLDER/tosses-n. JOURNAL is 0 or 1.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from actor.actor_loop import ActorSettings, run_actor
from actor.engine_pool import EnginePool
from actor.env_threads import EnvThreads
from actor.episode import EpisodeLimits
from actor.isolation.lifeline import die_with_parent
from actor.journal import Journal
from actor.render import Renderer
from actor.rollout import Player
from shared.engine.engine_api import EngineClient
from shared.families.registry import vocab_size_in
from shared.types import Completion, Sample, VersionSpan
from shared.vision import VisionSpec
from shared.wire.codec import TokenRules

MODEL = "launch/models/colour_tiny"
TURN_S, LONG_TURNS, LONG_SHARE = 0.05, 20, 0.3


def rules() -> TokenRules:
    spec = VisionSpec.load(MODEL)
    return TokenRules(spec.image_token_id, spec.banned_ids, vocab_size_in(MODEL))


def engine_of(life: int) -> str:
    """Return the engine URL that the actor's n-th process reports to the learner."""
    return f"http://life-{life}"


class Coin(EngineClient):
    def __init__(self, renderer: Renderer, folder: Path, life: int) -> None:
        super().__init__(engine_of(life))
        self._renderer, self._version, self._tosses = renderer, folder / "version", folder / f"tosses-{life}"
        self._random = random.SystemRandom()

    async def generate(self, *_: Any, **__: Any) -> Completion:
        await asyncio.sleep(TURN_S)
        text = "long" if self._random.random() < LONG_SHARE else "short"
        version = int(self._version.read_text())
        with self._tosses.open("ab") as file:
            file.write(b".")
        ids = (*self._renderer.tokenizer.encode(text, add_special_tokens=False), self._renderer.end_id)
        return Completion(ids, (-0.5,) * len(ids), (VersionSpan(version, 0, len(ids)),), "stop")


class Walk:
    """An environment whose first answer decides its length, which it writes to `flips`."""

    def __init__(self, sample: Sample, flips: Path) -> None:
        self._seed, self._flips, self._heard = sample.metadata["seed"], flips, list[str]()

    def reset(self) -> Any:
        return {"obs_str": f"{self._seed}"}, {}

    def step(self, text: str) -> Any:
        self._heard.append(text)
        turns = LONG_TURNS if self._heard[0] == "long" else 1
        if len(self._heard) == 1:
            with self._flips.open("a") as file:
                file.write(f"{self._seed} {turns}\n")
        return {"obs_str": f"{len(self._heard)}"}, len(self._heard) == turns, {}

    def format_observation(self, observation: Any) -> Any:
        return {"role": "user", "content": observation["obs_str"]}


async def live(learner: str, folder: Path, journaled: bool, renderer: Renderer, life: int) -> int:
    journal = Journal(folder / "journal", 2**20) if journaled else None
    engines = EnginePool([Coin(renderer, folder, life)])
    limits = EpisodeLimits(max_turns=LONG_TURNS, max_tokens=10_000, max_context=10_000)
    player = Player(lambda s: Walk(s, folder / "flips"), renderer, engines, limits, EnvThreads(2), journal=journal)
    settings = ActorSettings("mortal", learner, (engine_of(life),), rules(), heartbeat_s=0.1)
    return await run_actor(settings, player.play, journal)


def main(learner: str, folder: str, journaled: str) -> None:
    renderer = Renderer(PreTrainedTokenizerFast.from_pretrained(MODEL), VisionSpec.load(MODEL))
    for life in itertools.count():
        child = os.fork()  # a fast start; possible since this process has one thread and no loop
        if not child:
            die_with_parent(signal.SIGKILL)
            os._exit(asyncio.run(live(learner, Path(folder), journaled == "1", renderer, life)))
        line = sys.stdin.readline()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not line:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
