"""Engines that hold their weights alike and were sent the same must tell equal checksums, whatever these are of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Told = Sequence[Mapping[str, str]]
"""Checksums of parameters by their names, of each tensor-parallel rank."""


@dataclass(frozen=True, slots=True)
class Witness:
    """What an engine tells of parameters whose checksums the learner cannot compute. `kind`: of engines that hold
    their weights alike; empty where that is not known."""

    kind: str
    told: Told
    names: Collection[str]


def disagreements(witnesses: Mapping[str, Witness]) -> dict[str, str]:
    """URL -> what is wrong, of engines that tell another checksum than most of their kind; of all of them where no
    checksum is told by most."""
    wrong: dict[str, str] = {}
    kinds: dict[tuple[str, int], dict[str, Witness]] = {}
    for url, witness in sorted(witnesses.items()):
        if witness.kind:
            kinds.setdefault((witness.kind, len(witness.told)), {})[url] = witness
    for (_, num_ranks), alike in kinds.items():
        for name in sorted(set[str]().union(*(witness.names for witness in alike.values()))):
            for rank in range(num_ranks):
                told = {url: w.told[rank][name] for url, w in alike.items() if name in w.told[rank]}
                for url, reason in _odd(told, name, f" on its rank {rank}" if num_ranks > 1 else "").items():
                    wrong.setdefault(url, reason)
    return wrong


def _odd(told: Mapping[str, str], name: str, where: str) -> dict[str, str]:
    """Of one parameter on one rank."""
    if len(set(told.values())) < 2:
        return {}
    ((usual, count),) = Counter(told.values()).most_common(1)
    if 2 * count > len(told):
        others = _few([url for url, value in told.items() if value == usual])
        odd = [url for url, value in told.items() if value != usual]
        return dict.fromkeys(odd, f"holds other values of {name}{where} than {others}, which were sent the same")
    return {
        url: f"holds other values of {name}{where} than "
        f"{_few([other for other, value in told.items() if value != told[url]])}, though it was sent the same"
        for url in told
    }


def _few(urls: Sequence[str]) -> str:
    return ", ".join(urls[:3]) + (f" and {len(urls) - 3} more" if len(urls) > 3 else "")
