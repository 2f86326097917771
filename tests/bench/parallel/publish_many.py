"""A publication to many engines: what it costs beside the bare broadcast, bucket by bucket, and a change of members.

    python -m tests.bench.parallel.publish_many [--engines N] [--rounds N] [--model NAME] [--shrink N]

The parameters have the names and the number of dimensions of the published model; each of their last two dimensions is
divided by --shrink, and a bucket of 512 MiB by its square. The engines are simulated in one process: each answers HTTP
and is a rank of the weight group of its own, over gloo, and throws away what it receives. Publications and bare
broadcasts of the same buckets to the same processes take turns. `overhead_ms` is the difference of their seconds,
`overhead_cpu_ms` that of the learner's processor seconds, both of a bucket, medians of the rounds. `rejoin_s` are the
seconds of the first publication after an engine is gone, beyond one without a change. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from learner.weights.engine_link import EngineLink
from learner.weights.gathering import Bucket, buckets
from learner.weights.weight_group import WeightGroup, WeightGroupManager
from learner.weights.weight_update import PhaseSeconds, WeightUpdate
from shared.engine.engine_api import EngineClient
from shared.engine.engine_messages import ServerInfo
from tests.support.many_engines import serve_many
from tests.support.small.published import published_config

BUCKET_BYTES = 512 << 20
LIMIT_S = 120.0


def weights(model: str, shrink: int) -> Iterator[tuple[str, Tensor]]:
    with torch.device("meta"):
        vlm = AutoModelForImageTextToText.from_config(published_config(model))
    for name, parameter in vlm.named_parameters():
        shape = list(parameter.shape)
        shape[-2:] = [-(-size // shrink) for size in shape[-2:]]  # of 1 at least
        yield name, torch.full(shape, 0.5)


class Learner:
    """Rank 0's end, without a policy: the buckets are there already."""

    def __init__(self, urls: list[str], held: list[Bucket]) -> None:
        self.link, self.manager, self.held = EngineLink(), WeightGroupManager("gloo", LIMIT_S), held
        self.members = {self.link.client(url): ServerInfo(names_updates=True) for url in urls}
        self.version = 0

    def publish(self) -> dict[str, float]:
        """Seconds and processor seconds, of all of it and of its buckets alone."""
        self.version += 1
        begun, begun_cpu = time.monotonic(), time.process_time()
        name, modes = f"{self.version}-x", ("in_place", LIMIT_S)
        update = WeightUpdate(self.link, self.manager, self.members, name, PhaseSeconds(), *modes, {})
        self.link.run(update.begin())
        first, first_cpu = time.monotonic(), time.process_time()
        for bucket in self.held:
            self.link.run(update.send(bucket))
        last, last_cpu = time.monotonic(), time.process_time()
        self.link.run(update.end())
        assert update.working, update.failed
        whole, whole_cpu = time.monotonic() - begun, time.process_time() - begun_cpu
        found = {"publication_s": whole, "publication_cpu_s": whole_cpu}
        return found | {"buckets_s": last - first, "buckets_cpu_s": last_cpu - first_cpu}

    def leave(self, url: str) -> None:
        self.members = {engine: c for engine, c in self.members.items() if engine.url != url}


class Bare:
    """The same bytes to the same processes, which do nothing but receive them."""

    def __init__(self, link: EngineLink, engines: list[EngineClient], held: list[Bucket]) -> None:
        self.held, self.group = held, WeightGroup("bare", 1 + len(engines), "gloo", LIMIT_S)
        sizes = [bucket.flat.numel() for bucket in held]
        common = {"master_address": "127.0.0.1", "master_port": self.group.port, "world_size": 1 + len(engines)}
        common |= {"group_name": "bare", "backend": "gloo", "sizes": sizes}
        asked = [
            link.start(engine.post("/receive_bare", common | {"rank_offset": rank}, LIMIT_S))
            for rank, engine in enumerate(engines, 1)
        ]
        self.group.connect()
        for answer in asked:
            link.wait(answer)

    def send(self) -> dict[str, float]:
        begun, begun_cpu = time.monotonic(), time.process_time()
        for bucket in self.held:
            self.group.broadcast(bucket.flat)
        return {"bare_s": time.monotonic() - begun, "bare_cpu_s": time.process_time() - begun_cpu}


def measure(urls: list[str], held: list[Bucket], rounds: int) -> dict[str, Any]:
    learner = Learner(urls, held)
    joined = learner.publish()["publication_s"]
    bare = Bare(learner.link, list(learner.members), held)
    bare.send()
    rows = [learner.publish() | bare.send() for _ in range(rounds)]
    found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    for kind in ("", "_cpu"):
        extra = [row[f"buckets{kind}_s"] - row[f"bare{kind}_s"] for row in rows]
        found[f"overhead{kind}_ms"] = 1e3 * statistics.median(extra) / len(held)
    found["join_s"] = joined - found["publication_s"]
    learner.leave(urls[-1])
    found["rejoin_s"] = learner.publish()["publication_s"] - found["publication_s"]
    learner.link.run(learner.manager.shutdown())
    learner.link.close()
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="Qwen3-VL-30B-A3B")
    parser.add_argument("--shrink", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    urls, process = started(arguments.engines)
    try:
        held = list(
            buckets(weights(arguments.model, arguments.shrink), torch.bfloat16, BUCKET_BYTES // arguments.shrink**2)
        )
        size = {
            "model": arguments.model,
            "shrink": arguments.shrink,
            "engines": len(urls),
            "parameters": sum(len(bucket.names) for bucket in held),
            "bytes": sum(bucket.flat.numel() for bucket in held),
            "buckets": len(held),
        }
        print(json.dumps(size | measure(urls, held, arguments.rounds)))
    finally:
        process.kill()
        process.join(10)


def started(count: int, limit_s: float = LIMIT_S) -> tuple[list[str], Any]:
    """(the engines' URLs, their process). RuntimeError if it ends, or says nothing within the limit."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=serve_many, args=(count, theirs), daemon=True)
    process.start()
    theirs.close()  # the child's end is the only one now: when it dies, ours is at its end
    ports, fault = None, f"has not told their ports within {limit_s:g} s"
    try:
        if ours.poll(limit_s):
            ports = ours.recv()
    except EOFError:
        fault = "ended before it told their ports"
    finally:
        ours.close()
        if ports is None:
            process.kill()
            process.join(10)
    if ports is None:
        raise RuntimeError(f"the process of the {count} simulated engines {fault}")
    return [f"http://127.0.0.1:{port}" for port in ports], process


if __name__ == "__main__":
    main()
