"""Which numbers of ranks fit: pure functions, and what is said of those that do not."""

from __future__ import annotations

from collections.abc import Sequence


def nearest(value: int, fitting: Sequence[int]) -> str:
    """The next numbers below and above `value` of those that fit, ascending, in words."""
    below, above = [n for n in fitting if n < value][-1:], [n for n in fitting if n > value][:1]
    return " or ".join(map(str, below + above))


def next_divisors(value: int, of: int) -> str:
    return nearest(value, [n for n in range(1, of + 1) if of % n == 0])


def deals(num_experts: int, rows: Sequence[int], ranks: int) -> list[int]:
    """Over how many of `ranks`, which share a copy of the parameters, experts can be dealt, ascending: divisors of both
    numbers that leave for each expert ranks which divide the `rows` of its matrices. 1: they are not dealt, or there
    are none (`num_experts` 0)."""
    both = [n for n in range(1, ranks + 1) if ranks % n == 0 and (num_experts or 1) % n == 0]
    return [n for n in both if n == 1 or not any(size % (ranks // n) for size in rows)]


def check_deal(expert: int, model_type: str, num_experts: int, rows: Sequence[int], ranks: int) -> None:
    """ValueError, with the next values that fit, if the model's experts cannot be dealt and cut over the ranks that
    share a copy of the parameters, which `expert` divides. `rows`: of an expert's matrices."""
    given = f"learner.parallel.expert = {expert}"
    if not num_experts:
        raise ValueError(f"{given}, but {model_type} has no experts; set it to 1 (qwen3_vl_moe has some)")
    fitting = deals(num_experts, rows, ranks)
    if num_experts % expert:
        raise ValueError(
            f"{given} does not divide the model's {num_experts} experts; set it to {nearest(expert, fitting)}"
        )
    if expert not in fitting:
        sizes = " and ".join(map(str, sorted({*rows})))
        raise ValueError(
            f"{given} leaves {ranks // expert} ranks to cut the {sizes} rows of an expert's matrices over, which they "
            f"do not divide; set it to {nearest(expert, fitting)}, or learner.parallel.shard_size lower"
        )
