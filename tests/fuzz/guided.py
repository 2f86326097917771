"""The wire's decoder under mutations guided by coverage (atheris): a message that reaches new code is mutated further.

    python -m tests.fuzz.guided --messages 200000 --seed 0

Starts from a valid message of each kind and changes it as `tests.fuzz` does. Any exception except `WireError` ends the
run with a traceback and a file that holds the message; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import atexit
import json
import random
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import atheris
import msgspec

with atheris.instrument_imports(include=["shared"]):
    import shared.wire.codec
    import shared.wire.frames  # noqa: F401 - instrumented here, used by tests.fuzz

from tests.fuzz.mutations import mutate, seeds, verdict_of

MAX_BYTES = 2**16
LIMIT_S, LIMIT_MIB = 10, 2048  # of one message, of the process
VALID = seeds()
verdicts: Counter[str] = Counter()


def frames_of(data: bytes) -> list[bytes]:
    """Empty for what is no list of frames."""
    with suppress(RecursionError, msgspec.MsgspecError):
        return msgspec.msgpack.decode(data, type=list[bytes])
    return []


def one(data: bytes) -> None:
    if frames := frames_of(data):
        verdicts[verdict_of(frames)] += 1


def mutated(data: bytes, max_size: int, seed: int) -> bytes:
    rng = random.Random(seed)
    try:
        packed = msgspec.msgpack.encode(mutate(frames_of(data) or rng.choice(VALID), rng))
    except Exception:  # noqa: BLE001 - too broken to be broken further
        packed = msgspec.msgpack.encode(mutate(rng.choice(VALID), rng))
    return packed if len(packed) <= max_size else data[:max_size]


def tell() -> None:
    print(json.dumps({"messages": verdicts.total(), "verdicts": dict(verdicts.most_common())}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number, frames in enumerate(VALID):
            (Path(folder) / str(number)).write_bytes(msgspec.msgpack.encode(frames))
        flags = [f"-atheris_runs={arguments.messages}", f"-seed={arguments.seed + 1}", f"-max_len={MAX_BYTES}"]
        flags += [f"-timeout={LIMIT_S}", f"-rss_limit_mb={LIMIT_MIB}", "-print_final_stats=0", "-verbosity=0"]
        atheris.Setup([sys.argv[0], *flags, folder], one, custom_mutator=mutated)
        atexit.register(tell)  # the fuzzer ends the process
        atheris.Fuzz()


if __name__ == "__main__":
    main()
