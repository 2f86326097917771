"""A publication of weights: seconds and bytes, and how long generation stands still, as a client sees it.

    python -m tests.bench.publish [--sglang] [--publications N] [--bucket-mb N] [--model tiny|large ...]
        [--lora merged|adapter]

Each model is published to one engine while a client has it generate, one short request after another. `broadcast_ratio`
is the time of a bare broadcast of the same bytes, in the same buckets and beside the same client, over that of the
publication's own. `still_frac` is the longest wait of the client that overlaps a publication, beyond its usual one,
over the seconds of the publication. The last line is one JSON object; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from actor.engine.weight_loader import broadcast, join_group
from launch.tiny_models.build import build_config, build_model, build_tokenizer, save
from learner.distributed import Ranks, close_ranks, init_ranks
from learner.model.policy import Policy, load_policy
from learner.weights.gathering import gathered_buckets
from learner.weights.publisher import Publisher
from learner.weights.verify import WeightVerifier
from learner.weights.weight_group import WeightGroup
from shared.config.recipe import ConfigError
from shared.engine.engine_api import EngineClient
from shared.vision import VisionSpec
from tests.support.engines import ask, engine_process, sglang_process
from tests.support.publishing import publish_settings
from tests.support.small.adapted import adapted_policy

SIZES: dict[str, dict[str, Any]] = {"tiny": {"hidden": 128, "layers": 4}, "large": {"hidden": 768, "layers": 7}}
PARTS = ("seconds", "gather_s", "broadcast_s", "load_s", "pause_s", "proof_s")


@dataclass
class Client:
    """Short requests, one after another; `ends` are the times at which answers came."""

    url: str
    ends: list[float] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        ask(self.url, self._talk)

    async def _talk(self, client: EngineClient) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            body = {"input_ids": [20 + number % 97, 30], "sampling_params": {"max_new_tokens": 1}}
            await client.post("/generate", body | {"extra_key": str(number)}, 60.0)
            self.ends.append(time.monotonic())

    def waits(self, begin: float, end: float) -> list[float]:
        """Those that overlap the interval."""
        pairs = zip(self.ends, self.ends[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > begin and earlier < end]

    @contextmanager
    def running(self) -> Iterator[Client]:
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join(60)


def make_model(folder: Path, size: str) -> None:
    tokenizer = build_tokenizer(["<answer>up</answer>"], vocab_size=640)
    config = build_config(tokenizer, **SIZES[size])
    save(folder, build_model(config), tokenizer)


@contextmanager
def bare_group(sizes: list[int]) -> Iterator[Any]:
    """A process that does nothing but receive: calling the group's `broadcast` sends to it."""
    group = WeightGroup("bare", 2, "gloo", 60.0)
    command = [sys.executable, __file__, "--receive", str(group.port), *map(str, sizes)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        group.connect()
        yield group
    finally:
        process.kill()
        process.wait(10)
        asyncio.run(group.abort())


def receive(port: int, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    group = join_group(
        address="127.0.0.1", port=port, rank=1, world_size=2, name="bare", backend="gloo", timeout_s=60.0
    )
    while True:
        for size in sizes:
            broadcast(group, torch.empty(size, dtype=torch.uint8), 600.0)


def measure(url: str, folder: Path, policy: Policy, ranks: Ranks, count: int, bucket_bytes: int) -> dict[str, Any]:
    settings = publish_settings(bucket_bytes=bucket_bytes)
    publisher = Publisher(policy, ranks, settings, WeightVerifier(policy, str(folder), ranks))
    publisher.publish(0, [url])  # joins
    flats = [bucket.flat for bucket in gathered_buckets(policy, ranks, bucket_bytes) if bucket]
    rows: list[dict[str, float]] = []
    with Client(url).running() as client, bare_group([flat.numel() for flat in flats]) as bare:
        for version in range(1, count + 1):
            quiet_from = time.monotonic()
            time.sleep(1.0)
            begin = time.monotonic()
            quiet = statistics.median(client.waits(quiet_from, begin))
            row = publisher.publish(version, [url])
            end = time.monotonic()
            assert row["publish/engines"] == 1, "the engine did not take the weights"
            time.sleep(0.2 + 2 * quiet)
            still = max(0.0, max(client.waits(begin, end)) - quiet)
            for flat in flats:
                broadcast_from = time.monotonic()
                bare.broadcast(flat)
                row["bare_s"] = row.get("bare_s", 0.0) + time.monotonic() - broadcast_from
            row |= {"still_s": still, "still_frac": still / row["publish/seconds"], "request_s": quiet}
            row["broadcast_ratio"] = row["bare_s"] / row["publish/broadcast_s"]
            rows.append(row)
    publisher.close()
    medians = {name.removeprefix("publish/"): statistics.median(row[name] for row in rows) for name in rows[0]}
    return {
        "bytes": int(medians["bytes"]),
        "buckets": len(flats),
        "publications": count,
        **{name: round(medians[name], 4) for name in (*PARTS, "bare_s", "broadcast_ratio", "request_s")},
        "still_s": round(medians["still_s"], 4),
        "still_frac": round(medians["still_frac"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", action="store_true", help="the real server (make sglang-env), not the embedded one")
    parser.add_argument("--publications", type=int, default=7)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--model", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--lora", choices=("merged", "adapter"), help="of rank 16, and how it is sent: none")
    parser.add_argument("--receive", nargs="+", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        return receive(arguments.receive[0], arguments.receive[1:])
    torch.set_num_threads(1)
    ranks = init_ranks("cpu")
    result: dict[str, Any] = {"engine": "sglang" if arguments.sglang else "embedded"}
    for size in arguments.model:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), size)
            lora = {"rank": 16, "publish": arguments.lora, "moved": 0.01}
            policy = adapted_policy(folder, **lora) if arguments.lora else load_policy(folder, VisionSpec.load(folder))
            make = sglang_process if arguments.sglang else engine_process
            with make(Path(folder)) as engine:
                found = measure(
                    engine.url, Path(folder), policy, ranks, arguments.publications, arguments.bucket_mb << 20
                )
            result[size] = found
            print(f"{size}: {found}", file=sys.stderr)
    close_ranks()
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
