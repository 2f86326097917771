"""Difficulty pools against drawing all samples alike, where each sample is learned by itself: episodes until 90 and
95 % are solved, of a mixture of which 60 % is solved at the start.

    python -m tests.bench.mixtures.contexts [--seeds 3] [--staleness 1]

A hundred samples, each a pair of tokens with one right move of eight. A policy of a few thousand parameters knows 60
of them and is uniform on the others. The ticket book, its pools and the trainer are the learner's; episodes are played
in this process, by the policy of the ticket's version. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from copy import deepcopy
from itertools import product

import numpy as np
import torch

from learner.distributed import Ranks, close_ranks, init_ranks
from learner.tickets.pools import PooledSource
from learner.tickets.sources import ListSource, TaskSource
from learner.tickets.ticket_book import TicketBook
from learner.tickets.ticket_records import BookSettings
from learner.training.trainer import Trainer
from shared.config.pools_section import PoolConfig
from shared.types import Ending, Group, Sample, Ticket, Trajectory, Turn
from tests.support.episodes import learner_config
from tests.support.small.policy import VOCAB_SIZE, SmallPolicy

MOVES, SAMPLES, KNOWN = 8, 100, 60
GROUPS, GROUP_SIZE, STEPS = 8, 8, 600
HEIGHTS = (0.9, 0.95)
BOUNDS = {"never": (0.0, 0.1), "some": (0.1, 0.9), "always": (0.9, 1.0)}


class Mixture:
    """The samples and their right moves. Contexts are the last tokens, latest first, as the policy reads them."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        pairs = list(product(range(16, 32), repeat=2))
        self.pairs = [pairs[i] for i in rng.permutation(len(pairs))[:SAMPLES]]
        self.right = rng.integers(MOVES, size=SAMPLES)
        self.contexts = torch.tensor([[b, a, VOCAB_SIZE] for a, b in self.pairs])

    def success(self, policy: SmallPolicy) -> np.ndarray:
        """Return the probability of the right move of each sample."""
        logprobs = policy.logprobs(self.contexts).exp().numpy()
        return logprobs[np.arange(SAMPLES), self.right]

    def teach(self, policy: SmallPolicy) -> None:
        """Teach the policy the known samples, and to be uniform on the others."""
        wanted = torch.full((SAMPLES, MOVES), 1 / MOVES)
        wanted[:KNOWN] = torch.nn.functional.one_hot(torch.from_numpy(self.right[:KNOWN]), MOVES).float()
        optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
        for _ in range(1500):
            loss = -(wanted * policy.vlm(self.contexts)[0]).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def play(self, policy: SmallPolicy, ticket: Ticket, rng: np.random.Generator) -> Group:
        number = int(ticket.sample.metadata["row"])
        logprobs = policy.logprobs(self.contexts[number : number + 1]).numpy()[0]
        moves = (logprobs + rng.gumbel(size=(GROUP_SIZE, MOVES))).argmax(1)
        played = [self.episode(number, int(move), float(logprobs[move]), ticket.version) for move in moves]
        return Group(ticket.id, "a", tuple(played))

    def episode(self, number: int, move: int, logprob: float, version: int) -> Trajectory:
        reward = float(move == self.right[number])
        return Trajectory(
            token_ids=np.array([*self.pairs[number], move], np.int32),
            loss_mask=np.array([0, 0, 1], np.uint8),
            behaviour_logprobs=np.array([0, 0, logprob], np.float32),
            policy_versions=np.array([-1, -1, version], np.int32),
            turns=(Turn(2, 3, reward),),
            reward=reward,
            images=(),
            ending=Ending.COMPLETED,
        )


def run(seed: int, pools: tuple[PoolConfig, ...], staleness: int, ranks: Ranks) -> tuple[list[float], float]:
    """Train; return the episodes until each of `HEIGHTS` is reached, and the success on the known samples then."""
    mixture, rng = Mixture(seed), np.random.default_rng(seed)
    policy = SmallPolicy(MOVES, seed)
    mixture.teach(policy)
    config = learner_config(objective="grpo", group_size=GROUP_SIZE, total_steps=STEPS, lr=1e-3)
    trainer = Trainer(policy, config, ranks)  # type: ignore[arg-type]
    rows = ListSource([Sample(str(i), metadata={"row": i}) for i in range(SAMPLES)], seed)
    settings = BookSettings(GROUP_SIZE, GROUPS, staleness, seed=seed)
    book = TicketBook(PooledSource([TaskSource("", rows)], pools, seed) if pools else rows, settings, nonce="n")
    policies = {0: deepcopy(policy)}
    reached: list[float] = []
    for step in range(STEPS):
        while (ticket := book.issue("a")) is not None:
            book.accept(mixture.play(policies[ticket.version], ticket, rng), "a")
        taken = book.take_groups(GROUPS)
        assert taken is not None
        trainer.step([group for _, group in taken], step)
        book.commit()
        book.version = step + 1
        policies = {step + 1: deepcopy(policy)}
        success = mixture.success(policy)
        reached += [(step + 1) * GROUPS * GROUP_SIZE for height in HEIGHTS[len(reached) :] if success.mean() >= height]
        if len(reached) == len(HEIGHTS):
            break
    return reached + [float("nan")] * (len(HEIGHTS) - len(reached)), float(success[:KNOWN].mean())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--weights", type=float, nargs=3, default=[1.0, 1.0, 0.03], help="of never, some, always")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    pools = tuple(
        PoolConfig(name=name, bounds=bounds, weight=weight)
        for (name, bounds), weight in zip(BOUNDS.items(), options.weights, strict=True)
    )
    ranks, shares = init_ranks("cpu"), []
    print("| seed | all alike: 90 %, 95 % | with pools | share | known samples at the end |\n|---|---|---|---|---|")
    for seed in range(options.seeds):
        (alike, known), (pooled, still) = (run(seed, each, options.staleness, ranks) for each in ((), pools))
        shares.append([b / a for a, b in zip(alike, pooled, strict=True)])
        of = ", ".join(f"{share:.2f}" for share in shares[-1])
        counts = " | ".join(", ".join(f"{n:,.0f}" for n in each) for each in (alike, pooled))
        print(f"| {seed} | {counts} | {of} | {known:.3f}, {still:.3f} |", flush=True)
    close_ranks()
    means = [statistics.mean(each) for each in zip(*shares, strict=True)]
    print(json.dumps({"weights": options.weights, "shares": dict(zip(HEIGHTS, means, strict=True))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
