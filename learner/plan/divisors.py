"""Numbers of ranks that fit, as pure functions, and the errors for those that do not."""

from __future__ import annotations

from collections.abc import Sequence


def nearest(value: int, fitting: Sequence[int]) -> str:
    """Return, as text, the nearest of the ascending numbers `fitting` below and above `value`."""
    below, above = [n for n in fitting if n < value][-1:], [n for n in fitting if n > value][:1]
    return " or ".join(map(str, below + above))


def next_divisors(value: int, of: int) -> str:
    return nearest(value, [n for n in range(1, of + 1) if of % n == 0])


def deals(num_experts: int, rows: Sequence[int], ranks: int) -> list[int]:
    """Return the ascending numbers of ranks over which experts can be dealt, of `ranks` that share a copy of the
    parameters.

    They divide both `ranks` and `num_experts`, and the number of ranks that remain for each expert divides the `rows`
    of its matrices. 1 means that experts are not dealt, or that there are none (`num_experts` 0).
    """
    both = [n for n in range(1, ranks + 1) if ranks % n == 0 and (num_experts or 1) % n == 0]
    return [n for n in both if n == 1 or not any(size % (ranks // n) for size in rows)]


def check_deal(expert: int, model_type: str, num_experts: int, rows: Sequence[int], ranks: int) -> None:
    """Raise ValueError, with the nearest values that fit, if the experts cannot be dealt and sharded over the ranks
    that share a copy.

    `expert` divides `ranks`. `rows`: row counts of an expert's matrices.
    """
    given = f"learner.parallel.expert = {expert}"
    if not num_experts:
        raise ValueError(f"{given}, but {model_type} has no experts; set it to 1")
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
