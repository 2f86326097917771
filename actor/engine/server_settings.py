"""The embedded engine's settings and command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints

PARENT_PID = os.getppid()  # read before the slow imports, to notice a parent that dies during them
DTYPES = ("float32", "bfloat16", "float16")


def _option(help: str, default: Any = MISSING) -> Any:
    return field(metadata={"help": help}) if default is MISSING else field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class EngineSettings:
    model_path: str = _option("folder of a model of a known family")
    port: int = _option("0 takes a free one, named in the log")
    host: str = _option("others than loopback only with --api-key-file", "127.0.0.1")
    api_key_file: str = _option("file of the key that each request must carry", "")
    device: str = _option("cpu or cuda", "cpu")
    mem_fraction: float = _option("share of a GPU's memory that it keeps to; 0 = all", 0.0)
    dtype: str = _option(", ".join(DTYPES), "float32")
    threads: int = _option("CPU threads of the model", 1)
    max_batch: int = _option("sequences that one step computes", 64)
    slots: int = _option("sequences whose KV is kept, also between two turns; 0 = twice --max-batch", 0)
    max_context: int = _option("tokens of one sequence, images expanded", 2048)
    min_pixels: int = _option("images below are enlarged; 0 = the model's own", 0)
    max_pixels: int = _option("images above are reduced; 0 = the model's own", 0)
    request_timeout_s: float = _option("longest time of one request", 300.0)
    update_timeout_s: float = _option("longest wait for one bucket of weights", 120.0)
    weight_version: str = _option("name of the weights in --model-path", "0")
    parent_pid: int = _option("exit when it is gone; 0 = do not watch", 0)

    @property
    def num_slots(self) -> int:
        return self.slots or 2 * self.max_batch


def parse_arguments(argv: Sequence[str] | None = None) -> EngineSettings:
    """Read the command line. The engine watches the process that started it, unless told otherwise."""
    parser = argparse.ArgumentParser(prog="python -m actor.engine.server", description="the embedded engine")
    kinds = get_type_hints(EngineSettings)
    for f in fields(EngineSettings):
        parser.add_argument(
            f"--{f.name.replace('_', '-')}",
            type=kinds[f.name],
            required=f.default is MISSING,
            default=PARENT_PID if f.name == "parent_pid" else f.default,
            choices=DTYPES if f.name == "dtype" else None,
            help=f.metadata["help"],
        )
    return EngineSettings(**vars(parser.parse_args(argv)))
