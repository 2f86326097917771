"""In SGLang's environment: builds its own class of the model in FOLDER/export and loads FOLDER/sent.safetensors by that
class's `load_weights`. Prints one JSON object: parameters that then differ from FOLDER/expected.safetensors, and those
that only one side has.

    .venv-sglang/bin/python -P tests/sglang/load_buckets.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.benchmark import one_batch as sglang
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader import get_model

FLAGS = ("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-overlap-schedule")
SIZES = ("--skip-server-warmup", "--max-total-tokens", "1000", "--mem-fraction-static", "0.1")


def built(folder: Path) -> Any:
    """As one of the server's model processes builds it, with the weights of the folder."""
    parser = argparse.ArgumentParser()
    sglang.ServerArgs.add_cli_args(parser)
    arguments = parser.parse_args(["--model-path", str(folder), *FLAGS, *SIZES])
    settings = sglang.ServerArgs.from_cli_args(arguments)
    sglang._set_envs_and_config(settings)
    ports = sglang.PortArgs.init_new(settings)
    rank = sglang.spawn_world_rank(settings, tp_rank=0, pp_rank=0)
    sglang.publish(settings, role="scheduler", ranks=sglang.SpawnRanks(world_rank=rank, gpu_id=0))
    sglang._init_process_global_configs()
    config = sglang.ModelConfig.from_server_args(settings)
    sglang.bootstrap.init_parallel_runtime(server_args=settings, device="cpu", dist_port=ports.nccl_port)
    sglang.bootstrap.init_layer_runtime(model_config=config)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = built(folder / "export")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.load_weights(load_file(folder / "sent.safetensors").items())
    expected = load_file(folder / "expected.safetensors")
    own = dict(model.named_parameters())
    different = [n for n in own.keys() & expected.keys() if not torch.equal(own[n].flatten(), expected[n])]
    alone = sorted(own.keys() ^ expected.keys())
    print(json.dumps({"class": type(model).__name__, "different": different, "alone": alone, "count": len(own)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
