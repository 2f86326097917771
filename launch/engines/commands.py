"""Engines of this host: the command that starts each, in what environment, and what can be known to be wrong before."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.engines.gpus import check_apart, check_shared, engine_gpus, gpu_bytes, names, num_visible
from launch.engines.network import check_key, check_ports, check_reach, url_of
from launch.engines.one_gpu import shared_flags
from launch.processes.children import ROOT, cpu_env
from shared.config import ConfigError, Recipe
from shared.engine_messages import NO_WEIGHTS
from shared.keys import read_api_key
from shared.nccl import variables
from shared.nccl.versions import environment_in, unequal_nccl

STAND_INS = ROOT / "launch" / "sglang_env" / "stand_ins"
PLUGIN = ROOT / "launch" / "sglang_env" / "plugin"
LAST_BYTES = 2**16  # of a log, that are looked through for its last lines
ONE_ALONE = ("pp-size", "pipeline-parallel-size", "dp-size", "data-parallel-size")
KEPT_IMAGES_MB = {"cpu": 256, "cuda": 2048}  # of the host, by device; 6 KiB a patch of 16 x 16 pixels
QUANTIZING = ("quantization", "torchao-config")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How one engine is started. `log`: the file its output goes to; None = this process's own stderr."""

    name: str
    url: str
    command: tuple[str, ...]
    env: dict[str, str]
    gpus: tuple[str, ...] = ()  # by the machine's names
    log: Path | None = None
    secret: tuple[Path, str] | None = field(default=None, repr=False)  # a file that it reads, its owner's alone
    shares_gpu: bool = False  # with the learner


def engine_specs(recipe: Recipe) -> tuple[EngineSpec, ...]:
    """All engines of the recipe. ConfigError for GPUs that are not there or an environment that is not built."""
    engine = recipe.engine
    gpus = engine_gpus(engine, num_visible() if engine.device == "cuda" else 0)
    make = {"embedded": _embedded, "sglang": _sglang}[engine.kind]
    return tuple(make(recipe, index, engine.port + index, names(own, os.environ)) for index, own in enumerate(gpus))


def check_host(recipe: Recipe, num_ranks: int = 0) -> tuple[EngineSpec, ...]:
    """The engines to start. ConfigError for those that cannot be, beside `num_ranks` ranks of the learner here, and for
    ranks without a GPU of their own."""
    if recipe.engine.elsewhere:
        return ()
    check_reach(recipe)
    if recipe.engine.shares_gpu:
        check_shared(recipe.engine, recipe.learner.device, num_ranks)
    if num_ranks and recipe.learner.device == "cuda" and (seen := num_visible()) < num_ranks:
        raise ConfigError(
            f"learner.device = 'cuda' with {num_ranks} ranks: torch sees {seen} GPUs here; start fewer ranks, or set "
            "learner.device to 'cpu'"
        )
    specs = engine_specs(recipe)
    check_ports(recipe)
    if not recipe.engine.shares_gpu and recipe.engine.device == recipe.learner.device == "cuda":
        check_apart(engine_gpus(recipe.engine, num_visible()), num_ranks)
        if num_ranks and recipe.engine.kind == "sglang":
            check_nccl(recipe)
    return specs


def check_alone(recipe: Recipe) -> None:
    """ConfigError unless this host has engines and actors that play: no other takes part."""
    engines = recipe.engine.count or recipe.engine.urls
    if not engines or not recipe.actor.groups:
        field = "actor.groups" if engines else "engine.count"
        raise ConfigError(f"{field} = 0 is for one host of several, and this command has one; set it to 1 or more")


def check_nccl(recipe: Recipe) -> None:
    """ConfigError if SGLang's environment has another NCCL than this process's, where the learner will run."""
    own, folder = environment_in(Path(sys.prefix)), ROOT / recipe.engine.sglang_env
    if why := unequal_nccl(own.nccl, environment_in(folder).nccl):
        raise ConfigError(f"engine.sglang_env = {recipe.engine.sglang_env!r}: {why}")


AFTER_CLIENT_S = 10.0  # an engine gives a request up after its client, who says which limit it was


def _embedded(recipe: Recipe, index: int, port: int, gpus: tuple[str, ...]) -> EngineSpec:
    engine, model = recipe.engine, recipe.model
    command = [sys.executable, "-m", "actor.engine.server", "--model-path", model.path, "--port", str(port)]
    command += ["--host", engine.host, "--device", engine.device, "--dtype", model.dtype]
    command += ["--threads", str(engine.threads)]
    command += ["--max-batch", str(engine.max_batch), "--max-context", str(model.max_context)]
    command += ["--min-pixels", str(model.min_pixels), "--max-pixels", str(model.max_pixels)]
    command += ["--weight-version", NO_WEIGHTS, "--update-timeout-s", str(recipe.learner.publish.timeout_s)]
    command += ["--request-timeout-s", str(engine.request_timeout_s + AFTER_CLIENT_S)]
    if engine.device == "cuda" and engine.mem_fraction:
        command += ["--mem-fraction", str(engine.mem_fraction)]
    if engine.api_key_file:
        read_api_key(engine.api_key_file)  # what is wrong with it is said now
        command += ["--api-key-file", engine.api_key_file]
    env = cpu_env(engine.threads) | _on_gpus(gpus)
    url = url_of(engine.host, port)
    return EngineSpec(f"engine on port {port}", url, tuple(command), env, gpus, shares_gpu=engine.shares_gpu)


def _sglang(recipe: Recipe, index: int, port: int, gpus: tuple[str, ...]) -> EngineSpec:
    python = sglang_python(recipe)
    log = Path(recipe.run.dir).resolve() / "engines" / f"{recipe.run.name}-{port}.log"
    flags, secret = sglang_flags(recipe, index, port), sglang_key(recipe, log.with_suffix(".yaml"))
    if secret is not None:
        flags["config"] = secret[0]
    command = [str(python), "-P", "-m", "sglang.launch_server", *_flags(flags)]
    env = cpu_env(recipe.engine.threads) | _on_gpus(gpus)
    env |= {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # ninja, for kernels built late
        "SGLANG_VLM_CACHE_SIZE_MB": "0",  # the vision tower trains: a kept embedding would be of older weights
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else every /health takes a second, and fails while paused
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # a server whose model process died ends at once
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }
    env |= {"PRONK_STAGE_WEIGHTS": str(int(stages_weights(recipe)))}
    env |= {"PRONK_DRAIN_PAUSES": str(int(recipe.engine.drain_pauses))}
    env |= {"PRONK_GROUP_TIMEOUT_S": str(recipe.learner.publish.timeout_s)}
    paths = [PLUGIN]
    if recipe.engine.device == "cpu":
        # compiling costs minutes at the first images and gains nothing on a CPU
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", **_cores(recipe.engine.tensor_parallel)}
        paths.append(STAND_INS)
    env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    return EngineSpec(
        f"engine on port {port}",
        url_of(recipe.engine.host, port),
        tuple(command),
        env,
        gpus,
        log,
        secret,
        recipe.engine.shares_gpu,
    )


def stages_weights(recipe: Recipe) -> bool:
    """Whether weights arrive beside generation, in memory of the host, and are installed between two steps."""
    beside = recipe.engine.device == "cpu" or recipe.engine.shares_gpu  # they come through the host's memory anyway
    return {"auto": beside or recipe.learner.lora.alone, "on": True, "off": False}[recipe.engine.stage_weights]


def sglang_key(recipe: Recipe, path: Path) -> tuple[Path, str] | None:
    """The API key as one of SGLang's YAML configurations, with the place to write it; None = there is no key. A flag
    would show it to every user of the machine. ConfigError for such a flag, and for a public host without a key."""
    flags = {name.lstrip("-").replace("_", "-"): value for name, value in recipe.engine.flags.items()}
    key = read_api_key(recipe.engine.api_key_file)
    for name in ("api-key", "admin-api-key"):
        if name in flags:
            raise ConfigError(f"engine.flags holds {name}, which ps would show; use engine.api_key_file instead")
    if key and "config" in flags:
        raise ConfigError("engine.flags holds config, which engine.api_key_file needs for itself; leave one out")
    check_key(flags.get("host", recipe.engine.host), key)
    return (path, f"api-key: {json.dumps(key)}\n") if key else None


def sglang_python(recipe: Recipe) -> Path:
    """The interpreter of SGLang's environment. ConfigError if it is not built, or built for the other device."""
    folder = ROOT / recipe.engine.sglang_env
    python = folder / "bin" / "python"
    if not python.exists() or not any(folder.glob("lib/python*/site-packages/sglang/launch_server.py")):
        raise ConfigError(
            f"engine.kind = 'sglang', but there is no SGLang in engine.sglang_env = {recipe.engine.sglang_env!r}; "
            "build it with: make sglang-env"
        )
    built_for = "cuda" if any(folder.glob("lib/python*/site-packages/sgl_kernel")) else "cpu"
    if built_for != recipe.engine.device:
        raise ConfigError(
            f"engine.device = {recipe.engine.device!r}, but the environment {recipe.engine.sglang_env!r} is built for "
            f"{built_for}; set engine.device = {built_for!r}, or build another one with: make sglang-env"
        )
    return python


def sglang_flags(recipe: Recipe, index: int, port: int) -> dict[str, Any]:
    """Flags of SGLang's server, without the dashes; those of `engine.flags` win."""
    engine, model = recipe.engine, recipe.model
    size = {"shortest_edge": model.min_pixels, "longest_edge": model.max_pixels}
    path = Path(model.path)
    flags: dict[str, Any] = {
        "model-path": str(path.resolve()) if path.exists() else model.path,
        "host": engine.host,
        "port": port,
        "device": engine.device,
        "dtype": model.dtype,
        "tensor-parallel-size": engine.tensor_parallel,
        "max-running-requests": engine.max_batch,
        "random-seed": recipe.run.seed + index,  # engines with one seed would sample the same tokens
        "mm-process-config": {"image": {"size": size}},
        "weight-version": NO_WEIGHTS,
        "skip-server-warmup": True,  # ours has an image
        "log-level-http": "warning",  # else its log has a line for each turn, for weeks
        # pixels of images that were sent: each turn shows all so far, and clients leave out what was kept
        "mm-preprocess-cache-size-mb": KEPT_IMAGES_MB[engine.device],
        "trust-mm-content-hashes": True,  # what is sent is compared all the same (`shared.engines.images`)
    }
    if engine.device == "cpu":
        flags |= _on_a_cpu(engine.max_batch * model.max_context)
    if engine.shares_gpu:
        flags |= shared_flags(recipe, gpu_bytes())
    elif engine.mem_fraction:
        flags["mem-fraction-static"] = engine.mem_fraction
    if engine.attention_backend:
        flags["attention-backend"] = engine.attention_backend
    if engine.mm_attention_backend:
        flags["mm-attention-backend"] = engine.mm_attention_backend
    own = {name.lstrip("-").replace("_", "-"): value for name, value in engine.flags.items()}
    for name, value in own.items():
        if name in ONE_ALONE and value != 1:
            raise ConfigError(
                f"engine.flags: {name} = {value!r}, but weights cannot be sent to such an engine; set it to 1, raise "
                "engine.tensor_parallel for larger models and engine.count for more engines"
            )
        if name in QUANTIZING and value:
            raise ConfigError(
                f"engine.flags: {name} = {value!r}, but SGLang would load new weights of a Qwen-VL model under the old "
                "scales; leave it out"
            )
    return flags | own


def _on_a_cpu(tokens: int) -> dict[str, Any]:
    return {
        "attention-backend": "torch_native",
        "disable-overlap-schedule": True,
        "sleep-on-idle": True,  # else its scheduler asks for work without a pause, on a core that others need
        "max-total-tokens": tokens,
        "mem-fraction-static": 0.1,
    }


def _flags(flags: Mapping[str, Any]) -> list[str]:
    """True is a bare flag, false none at all; a list is several values, a table JSON."""
    arguments: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        arguments.append(f"--{name}")
        if isinstance(value, list | tuple):
            arguments += [str(item) for item in value]
        elif value is not True:
            arguments.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return arguments


def _on_gpus(gpus: tuple[str, ...]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **variables.settings(os.environ)} if gpus else {}


def _cores(num_ranks: int) -> dict[str, str]:
    """SGLang wants to know which cores each rank on a CPU has, where there is more than one."""
    if num_ranks == 1 or os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return {}
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::num_ranks] or cores for rank in range(num_ranks)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares)}


def last_lines(log: Path | None, count: int = 12) -> str:
    """The end of an engine's log, for an error message."""
    if log is None or not log.exists():
        return "its last lines are above"
    with log.open("rb") as file:  # of an engine that has run for weeks it may be large
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return f"its log {log} ends:\n" + "\n".join(f"    {line[:300]}" for line in lines[-count:])
