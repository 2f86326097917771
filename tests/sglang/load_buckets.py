"""In SGLang's environment: for each FOLDER, builds SGLang's own class of the model in FOLDER/export as each rank of a
server has it, and loads FOLDER/sent.safetensors by that class's `load_weights`. FOLDER/cases.json names the servers.
FOLDER/CASE_RANK.json then says of each case and rank which parameters differ between the export and what was sent.

    .venv-sglang/bin/python -P tests/sglang/load_buckets.py FOLDER...
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.benchmark import one_batch as sglang
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
from sglang.srt.layers import linear
from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
from sglang.srt.model_loader import get_model
from sglang.srt.models import qwen3_5, registry
from sglang.srt.runtime_context import get_parallel

MODELS = registry.ModelRegistry
"""All of SGLang's models, imported once for all ranks."""
FLAGS = ("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-overlap-schedule")
SIZES = ("--skip-server-warmup", "--max-total-tokens", "1000", "--mem-fraction-static", "0.1")


def built(settings: Any, port: int, rank: int, like: str) -> Any:
    """As one of the server's model processes builds it, with the weights of the folder. `like` a GPU: the loaders take
    the branches that they take there, and sizes stay those of the model."""
    sglang._set_envs_and_config(settings)
    world_rank = sglang.spawn_world_rank(settings, tp_rank=rank, pp_rank=0)
    sglang.publish(settings, role="scheduler", ranks=sglang.SpawnRanks(world_rank=world_rank, gpu_id=rank))
    sglang._init_process_global_configs()
    config = sglang.ModelConfig.from_server_args(settings)
    sglang.bootstrap.init_parallel_runtime(server_args=settings, device="cpu", dist_port=port)
    sglang.bootstrap.init_layer_runtime(model_config=config)
    if like == "gpu":
        linear._is_cpu = fused_moe._is_cpu = qwen3_5._is_cpu = False
    else:
        config = adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), get_parallel().tp_size)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def load(folder: Path, case: dict[str, Any], settings: Any, port: int, rank: int) -> None:
    torch.set_num_threads(1)
    model = built(settings, port, rank, case["like"])
    exported = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.load_weights(load_file(folder / "sent.safetensors").items())
    found = {"class": type(model).__name__, "different": different(model, exported), "count": len(exported)}
    (folder / f"{case['name']}_{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()  # rank 0 holds the store that the others may still be joining groups by


def different(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> list[str]:
    return sorted(name for name, own in model.named_parameters() if not equal(own, expected[name]))


def equal(own: torch.Tensor, expected: torch.Tensor) -> bool:
    """Byte for byte."""
    return own.shape == expected.shape and torch.equal(own.view(torch.uint8), expected.view(torch.uint8))


def by_ranks(folder: Path, case: dict[str, Any]) -> None:
    """A process for each rank; SystemExit where one fails."""
    parser, fork = argparse.ArgumentParser(), multiprocessing.get_context("fork")
    sglang.ServerArgs.add_cli_args(parser)
    flags = ("--model-path", str(folder / "export"), *FLAGS, *SIZES, "--tp-size", str(case["ranks"]), *case["flags"])
    settings = sglang.ServerArgs.from_cli_args(parser.parse_args(flags))
    port = sglang.PortArgs.init_new(settings).nccl_port
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * case["ranks"])
    ranks = [fork.Process(target=load, args=(folder, case, settings, port, rank)) for rank in range(case["ranks"])]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        ranks[0].join(0.2)
        if any(process.exitcode for process in ranks):
            for process in ranks:
                process.kill()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"case {case['name']}: a rank failed: {[process.exitcode for process in ranks]}")


def main(folders: list[Path]) -> None:
    for folder in folders:
        for case in json.loads((folder / "cases.json").read_text()):
            by_ranks(folder, case)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
