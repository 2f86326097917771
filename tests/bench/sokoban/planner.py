"""How well Sokoban can be played by a policy that reads every board right: what planning alone costs in episodes.

    python -m tests.bench.sokoban.planner [--steps 180] [--recipe RECIPE] [--misread 0.1] [--misforeseen 0.2]

A perceptron gets the words that small models write down in <think>, read without a mistake, and chooses one move
at a time, up to three a turn and eight turns, as they do. It is first taught good moves within three of the solution,
on boards of one box, then trained by the environment's reward with V-trace on the recipe's variants of boards, so its
success is what a model of the same words could reach with as many episodes. With `--misread` and `--misforeseen` so
large a part of all positions is always taken for one beside it, at a turn's first move and at later ones, as by a model
that reads wrongly.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
import zlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from envs.boards.board import MOVES, Board
from envs.boards.board_words import frame_of, inner_walls, paired, state
from envs.boards.generate import BoardSpec, make_board
from envs.boards.solver import optimal_first_moves
from envs.sokoban import OFF_TARGET_REWARD, move_reward
from learner.vtrace import token_vtrace

ROOT = Path(__file__).resolve().parents[3]
TURNS, MOVES_A_TURN, REACH, EXPERTISE = 8, 3, 3, 0.8
MOST_WORDS, WIDTH = 2048, 256
CLASSES = {"1_3": (1, 3), "4_6": (4, 6), "7_9": (7, 9), "10_up": (10, 10_000)}
HELD_OUT, TAUGHT = 1_000_000, 2_000_000  # first seeds; training boards begin at 0
WARM_UP, FINAL_SHARE, CLIP = 10, 0.02, 0.2


@dataclass(frozen=True, slots=True)
class Seen:
    """A position as the perceptron sees it: its words' numbers, and the move that each of its choices stands for."""

    words: tuple[int, ...]
    moves: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    seen: Seen
    choice: int
    logprob: float
    reward: float
    turn: int
    solved: bool


class Reader:
    """Numbers the words of positions; each is read once."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | str, str], int] = {}
        self._seen: dict[Board, Seen] = {}

    def taken_for(self, board: Board, wrong: float) -> Board:
        """Of a share `wrong` of all positions the one that some move leads to, always the same; else itself."""
        drawn = zlib.crc32(repr((board.cells, board.boxes, board.player)).encode())
        beside = board.moved(MOVES[drawn // 1000 % 4])
        return beside if drawn % 1000 < 1000 * wrong and not beside.solved else board

    def __call__(self, board: Board) -> Seen:
        """What reads alike however the board is turned: all but the cells and the frame's name."""
        if board not in self._seen:
            numbers, walls = list[int](), len(inner_walls(board))
            for place, told in enumerate(state(board).split("@")[1:]):
                player, target, room, *obstacles, idle = told.split()[1:]
                words: list[tuple[int | str, str]] = [*enumerate((player, target, room, idle))]
                words += [("wall" if i < walls else "box", each) for i, each in enumerate(obstacles[::2])]
                numbers += [self._numbers.setdefault((place, *word), len(self._numbers)) for word in words]
            frame = frame_of(board.width, *paired(board)[0], board.player)
            self._seen[board] = Seen(tuple(numbers), frame.moves)
        return self._seen[board]


class Perceptron(nn.Module):
    """Sums what its words mean, then two residual layers."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(MOST_WORDS, WIDTH, mode="sum")
        nn.init.normal_(self.words.weight, std=0.3)
        self.turns = nn.Embedding(TURNS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )
        self.leave = nn.Linear(WIDTH, outputs)
        for weight in (self.turns.weight, self.leave.weight, self.leave.bias):
            nn.init.zeros_(weight)

    def forward(self, seen: Sequence[Seen], turns: Tensor | None = None) -> Tensor:
        counts = torch.tensor([0, *(len(each.words) for each in seen[:-1])])
        hidden = self.words(torch.tensor([word for each in seen for word in each.words]), counts.cumsum(0))
        if turns is not None:
            hidden = hidden + self.turns(turns)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.leave(functional.gelu(hidden))


def boards(first: int, count: int, specs: Sequence[BoardSpec]) -> list[Board]:
    """One after the other of each kind."""
    return [make_board(seed, specs[seed % len(specs)]) for seed in range(first, first + count)]


def teach(policy: Perceptron, reader: Reader, count: int = 6000, steps: int = 600) -> None:
    """Good moves where the solution is within reach, none preferred elsewhere."""
    rng = np.random.default_rng(0)
    shown: list[tuple[Seen, list[float]]] = []
    for board in boards(TAUGHT, count, [BoardSpec(split="train")]):
        for _ in range(TURNS):
            best = optimal_first_moves(board)
            seen, wanted = reader(board), [1 / 4] * 4
            if 0 < len(best) <= REACH:
                wanted = [(1 - EXPERTISE) / 4 + EXPERTISE * (move == best[0]) for move in seen.moves]
            shown.append((seen, wanted))
            board = board.moved(best[0] if best and rng.random() < 0.35 else MOVES[rng.integers(4)])
            if board.solved:
                break
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    for _ in range(steps):
        chosen = [shown[i] for i in rng.integers(len(shown), size=256)]
        logprobs = policy([seen for seen, _ in chosen]).log_softmax(-1)
        loss = -(torch.tensor([wanted for _, wanted in chosen]) * logprobs).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def play(
    policy: Perceptron,
    reader: Reader,
    starts: Sequence[Board],
    *,
    greedy: bool,
    wrong: tuple[float, float] = (0, 0),
    off_target: float = OFF_TARGET_REWARD,
) -> list[list[Step]]:
    """Whole episodes. `wrong`: shares of positions that are misread at the first move of a turn, and at later ones;
    `off_target`: the reward of a push that takes a box off its target."""
    positions, episodes = list(starts), [list[Step]() for _ in starts]
    for move in range(TURNS * MOVES_A_TURN):
        live = [i for i, board in enumerate(positions) if not board.solved]
        if not live:
            break
        share = wrong[move % MOVES_A_TURN > 0]
        seen = [reader(reader.taken_for(positions[i], share)) for i in live]
        logprobs = policy(seen).log_softmax(-1)
        choices = logprobs.argmax(-1) if greedy else torch.multinomial(logprobs.exp(), 1)[:, 0]
        for row, i in enumerate(live):
            choice = int(choices[row])
            after = positions[i].moved(seen[row].moves[choice])
            reward, logprob = move_reward(positions[i], after, off_target), float(logprobs[row, choice])
            episodes[i].append(Step(seen[row], choice, logprob, reward, move // MOVES_A_TURN, after.solved))
            positions[i] = after
    return episodes


def solved(episodes: Sequence[list[Step]]) -> np.ndarray:
    return np.array([episode[-1].solved for episode in episodes])


def update(policy: Perceptron, critic: Perceptron, episodes: list[list[Step]], scale: float, gamma: float, lam: float,
           entropy_coef: float) -> tuple[Tensor, float]:  # fmt: skip
    """The loss, and the advantages' running deviation: V-trace by moves, discount and lambda between turns."""
    steps = [step for episode in episodes for step in episode]
    seen, turns = [step.seen for step in steps], torch.tensor([step.turn for step in steps])
    ends = np.cumsum([len(episode) for episode in episodes]) - 1
    episode_end = torch.zeros(len(steps), dtype=torch.bool)
    episode_end[ends] = True
    turn_end = episode_end | torch.cat([turns[1:] != turns[:-1], torch.ones(1, dtype=torch.bool)])
    logprobs_N4 = policy(seen).log_softmax(-1)
    logprobs = logprobs_N4.gather(1, torch.tensor([[step.choice] for step in steps]))[:, 0]
    values = critic(seen, turns)[:, 0]
    log_rhos = logprobs.detach() - torch.tensor([step.logprob for step in steps])
    rewards = torch.tensor([step.reward for step in steps])
    found = token_vtrace(log_rhos, rewards, values.detach(), turn_end, episode_end, gamma=gamma, lam=lam)
    deviation = float(found.advantages.std())
    scale = deviation if scale == 0.0 else 0.9 * scale + 0.1 * deviation
    advantages = (found.advantages - found.advantages.mean()) / scale
    ratios = log_rhos.exp()
    clipped = torch.where(advantages > 0, ratios > 1 + CLIP, ratios < 1 - CLIP)
    weights = ratios.clamp(max=1.0).masked_fill(clipped, 0.0)
    entropies = -(logprobs_N4.exp() * logprobs_N4).sum(-1)
    policy_loss = -(weights * advantages * logprobs).mean() - entropy_coef * entropies.mean()
    return policy_loss + (values - found.vs).square().mean(), scale


def measure(options: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(options.seed)
    rng, reader, wrong = np.random.default_rng(options.seed), Reader(), (options.misread, options.misforeseen)
    recipe = tomllib.loads(options.recipe.read_text())
    number = (recipe["env"]["args"]["num_boxes"],)
    held = boards(HELD_OUT, options.boards, [BoardSpec(num_boxes=number, split="heldout")])
    specs = [
        BoardSpec(num_boxes=number, split="train", **variant)
        for variant in recipe.get("data", {}).get("variants", [{}])
    ]
    lengths = np.array([len(optimal_first_moves(board)) for board in held])

    def evaluated(policy: Perceptron, *, greedy: bool) -> dict[str, float]:
        won = solved(play(policy, reader, held, greedy=greedy, wrong=wrong))
        parts = {name: (lengths >= low) & (lengths <= high) for name, (low, high) in CLASSES.items()}
        found = {"success": won.mean()} | {f"success_{name}": won[part].mean() for name, part in parts.items()}
        return {name: round(float(share), 3) for name, share in found.items()}

    policy, critic = Perceptron(4), Perceptron(1)
    teach(policy, reader)
    start = deepcopy(policy)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], options.lr, betas=(0.9, 0.98))
    scale, turns, began = 0.0, 0, time.monotonic()
    for step in range(options.steps):
        rate = min(1.0, (step + 1) / WARM_UP) * (1 - (1 - FINAL_SHARE) * step / options.steps)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * rate
        starts = boards(step * options.episodes, options.episodes, specs)
        episodes = play(policy, reader, starts, greedy=False, wrong=wrong, off_target=options.off_target)
        turns += sum(episode[-1].turn + 1 for episode in episodes)
        for part in np.array_split(rng.permutation(len(episodes)), options.minibatches):
            chosen = [episodes[i] for i in part]
            loss, scale = update(policy, critic, chosen, scale, options.gamma, options.lam, options.entropy_coef)
            optimizer.zero_grad()
            loss.backward()
            for net in (policy, critic):
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}  success {solved(episodes).mean():.2f}", flush=True)
    return vars(options) | {
        "recipe": options.recipe.stem,
        "turns": turns,
        "seconds": round(time.monotonic() - began),
        "sampled_before": evaluated(start, greedy=False),
        "greedy_before": evaluated(start, greedy=True),
        "sampled_after": evaluated(policy, greedy=False),
        "greedy_after": evaluated(policy, greedy=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 180), ("episodes", 64), ("minibatches", 4), ("boards", 500), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in (("lr", 2e-3), ("gamma", 0.97), ("lam", 0.95), ("entropy-coef", 0.01), ("misread", 0.0),
                        ("misforeseen", 0.0), ("off-target", OFF_TARGET_REWARD)):  # fmt: skip
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--recipe", type=Path, default=ROOT / "launch/recipes/sokoban_tiny.toml")
    torch.set_num_threads(1)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
