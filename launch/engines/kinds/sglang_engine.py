"""SGLang's server, in the environment that `make sglang-env` builds for it.

If it shares its GPU with the learner, the size of its cache in tokens is given explicitly. By itself it would use the
memory that is free at its start, which depends on how much the learner has allocated by then.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.catalog import sizes_of_model
from launch.engines.gpus import DRIVER, gpu_bytes
from launch.engines.kinds.engine_kind import EngineKind, EnginePlacement, EngineSpec, engine_env
from launch.engines.network import check_key, url_of
from launch.findings import Finding, failed, not_checked, ok, warning
from launch.processes.children import ROOT
from learner.plan.duration import LEAST_EPISODES, Engines
from learner.plan.memory_use import DTYPE_BYTES
from shared.config.recipe import ConfigError, Recipe
from shared.engine.nccl_versions import SGLANG_TESTED, TORCH_OF_SGLANG, Environment, environment_in
from shared.families.registry import family_in
from shared.keys import read_api_key
from shared.util.own_commands import command, is_installed

USUAL_CUDA = Path("/usr/local/cuda")
STAND_INS = ROOT / "launch" / "sglang_env" / "stand_ins"
PLUGIN = ROOT / "launch" / "sglang_env" / "plugin"
ONE_ALONE = ("pp-size", "pipeline-parallel-size", "dp-size", "data-parallel-size")
QUANTIZING = ("quantization", "torchao-config")
IMAGE_CACHE_MB = {"cpu": 256, "cuda": 2048}  # host memory, by device; 6 KiB per patch of 16 x 16 pixels
PAUSE_S, LIMITS_IN_A_PAUSE = 1200.0, 4  # longer than `PublishSettings.longest_s` for every limit of a bucket
FREE_FRACTION = 0.9  # share of a shared GPU's free memory that the server may use


class SglangEngine(EngineKind):
    """`python -m sglang.launch_server`, with Pronk's plugin."""

    setup_command = "make sglang-env"

    def spec(self, recipe: Recipe, placement: EnginePlacement) -> EngineSpec:
        """Return how one server is started. Raise ConfigError for flags that are not supported."""
        python = sglang_python(recipe)
        log = Path(recipe.run.dir).resolve() / "engines" / f"{recipe.run.name}-{placement.port}.log"
        flags = sglang_flags(recipe, placement)
        secret = sglang_key(recipe, log.with_suffix(".yaml"))
        if secret is not None:
            flags["config"] = secret[0]
        return EngineSpec(
            placement.name,
            url_of(recipe.engine.host, placement.port),
            (str(python), "-P", "-m", "sglang.launch_server", *_words(flags)),
            engine_env(recipe, placement.gpus) | _env(recipe, python),
            placement.gpus,
            log,
            secret,
            recipe.engine.shares_gpu,
        )

    def environment(self, recipe: Recipe) -> Path:
        """Return engine.sglang_env."""
        return sglang_folder(recipe)

    def check(self, recipe: Recipe) -> None:
        """Raise ConfigError if SGLang's environment is not built, or is built for the other device."""
        sglang_python(recipe)

    def examine(self, recipe: Recipe) -> Finding:
        """Check SGLang's environment by its folder alone."""
        try:
            sglang_python(recipe)
        except ConfigError as error:
            problem, _, cure = str(error).partition("; ")
            if recipe.engine.device == "cuda" and not DRIVER.exists() and "is built for cpu" in problem:
                return not_checked("engine software", problem, "ask again on a machine with the GPUs")
            return failed("engine software", problem, cure)
        return judge_versions(environment_in(self.environment(recipe)), recipe.engine.device)


def judge_versions(versions: Environment, device: str) -> Finding:
    """Compare the versions in an environment with the tested SGLang and with the torch that it requires."""
    nccl = f", NCCL {versions.nccl}" if versions.nccl else ""
    words = f"SGLang {versions.sglang} with torch {versions.torch}{nccl}, transformers {versions.transformers}"
    if versions.sglang != SGLANG_TESTED:
        return warning(
            "engine software", f"{words}; tested is {SGLANG_TESTED}", f"{setup_command()} builds the tested one"
        )
    wanted = TORCH_OF_SGLANG[versions.sglang]
    if device == "cuda" and versions.torch.partition("+")[0] != wanted:
        problem = f"{words}; this SGLang is made for torch {wanted}"
        return warning("engine software", problem, f"build it anew: {setup_command()}")
    return ok("engine software", words)


def cuda_home(folder: Path, environ: Mapping[str, str] = os.environ, usual: Path = USUAL_CUDA) -> str:
    """Return the folder of CUDA's toolkit whose nvcc compiles SGLang's kernels: of CUDA_HOME, of the PATH, the usual
    one, or that of SGLang's environment; empty if there is none."""
    home, found = environ.get("CUDA_HOME", ""), shutil.which("nvcc", path=environ.get("PATH", ""))
    here = [Path(home, "bin", "nvcc")] if home else []
    here += [Path(found).resolve()] if found else []
    here += [usual / "bin" / "nvcc", *sorted(folder.glob("lib/python*/site-packages/nvidia/cu*/bin/nvcc"))]
    return next((str(nvcc.parents[1]) for nvcc in here if nvcc.is_file()), "")


def _env(recipe: Recipe, python: Path) -> dict[str, str]:
    """Return the environment variables for SGLang's server and the plugin."""
    env = {
        # The path of ninja, which builds kernels at run time.
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "SGLANG_VLM_CACHE_SIZE_MB": "0",  # else embeddings of older weights would be cached while the tower trains
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else every /health takes a second, and fails while paused
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # so that a server whose model process died ends at once
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "PRONK_STAGE_WEIGHTS": str(int(stages_weights(recipe))),
        "PRONK_DRAIN_PAUSES": "1",  # a pause waits for the running forward, so that its tokens get the right version
        "PRONK_GROUP_TIMEOUT_S": str(recipe.learner.publish.timeout_s),
    }
    paths = [PLUGIN]
    if recipe.engine.device == "cpu":
        # compiling takes minutes at the first images and gains nothing on a CPU
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", **_cores(recipe.engine.tensor_parallel)}
        paths.append(STAND_INS)
    elif home := cuda_home(sglang_folder(recipe)):
        env["CUDA_HOME"] = home
    return env | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def cache_flags(recipe: Recipe, num_bytes: float) -> dict[str, Any]:
    """Return the flags that give a server its share of a GPU with `num_bytes` of memory. Raise ConfigError if the share
    is too small."""
    model, engine = recipe.model, recipe.engine
    share = Engines.sharing(num_bytes, engine.mem_fraction, engine.max_batch, DTYPE_BYTES[model.dtype])
    tokens = share.cache_tokens(sizes_of_model(model.path))
    if tokens < LEAST_EPISODES * model.max_context:
        raise ConfigError(
            f"engine.mem_fraction = {engine.mem_fraction} of {num_bytes / 1e9:.0f} GB leaves room for {max(0, tokens)} "
            f"tokens of episodes beside the weights, fewer than {LEAST_EPISODES} of model.max_context = "
            f"{model.max_context}; raise it, or lower model.max_context"
        )
    return {"mem-fraction-static": FREE_FRACTION, "max-total-tokens": tokens}


def stages_weights(recipe: Recipe) -> bool:
    """Tell whether weights are received during generation into host memory, and installed between two steps."""
    beside = recipe.engine.device == "cpu" or recipe.engine.shares_gpu  # weights pass through host memory anyway
    return {"auto": beside or recipe.learner.lora.alone, "on": True, "off": False}[recipe.engine.stage_weights]


def sglang_key(recipe: Recipe, path: Path) -> tuple[Path, str] | None:
    """Return the API key as one of SGLang's YAML configurations, with the path to write it to; None without a key.

    As a flag it would be visible to every user of the machine. Raise ConfigError for such a flag, and for a host off
    loopback without a key."""
    flags = {name.lstrip("-").replace("_", "-"): value for name, value in recipe.engine.flags.items()}
    key = read_api_key(recipe.engine.api_key_file)
    for name in ("api-key", "admin-api-key"):
        if name in flags:
            raise ConfigError(f"engine.flags holds {name}, which ps would show; use engine.api_key_file instead")
    if key and "config" in flags:
        raise ConfigError("engine.flags holds config, which engine.api_key_file needs for itself; leave one out")
    check_key(flags.get("host", recipe.engine.host), key)
    return (path, f"api-key: {json.dumps(key)}\n") if key else None


def sglang_folder(recipe: Recipe) -> Path:
    """Return the folder that engine.sglang_env names: in the working folder if it is there, else in the project's."""
    name = recipe.engine.sglang_env
    return Path(name).absolute() if is_installed() or Path(name).exists() else ROOT / name


def setup_command(recipe: Recipe | None = None) -> str:
    """Return the command that builds SGLang's environment, by default the one that most recipes name."""
    if not is_installed():
        return SglangEngine.setup_command
    return command("engine-env") + (f" {recipe.engine.sglang_env}" if recipe else "")


def sglang_python(recipe: Recipe) -> Path:
    """Return the Python interpreter of SGLang's environment. Raise ConfigError if the environment is not built, or is
    built for the other device."""
    folder = sglang_folder(recipe)
    python = folder / "bin" / "python"
    if not python.exists() or not any(folder.glob("lib/python*/site-packages/sglang/launch_server.py")):
        raise ConfigError(
            f"engine.kind = 'sglang', but there is no SGLang in engine.sglang_env = {recipe.engine.sglang_env!r}; "
            f"build it with: {setup_command(recipe)}"
        )
    built_for = "cuda" if any(folder.glob("lib/python*/site-packages/sgl_kernel")) else "cpu"
    if built_for != recipe.engine.device:
        raise ConfigError(
            f"engine.device = {recipe.engine.device!r}, but the environment {recipe.engine.sglang_env!r} is built for "
            f"{built_for}; set engine.device = {built_for!r}, or build another one with: {setup_command(recipe)}"
        )
    return python


def sglang_flags(recipe: Recipe, placement: EnginePlacement) -> dict[str, Any]:
    """Return the flags of SGLang's server, without dashes; `engine.flags` overrides the others. Raise ConfigError for
    flags that are not supported."""
    engine, model = recipe.engine, recipe.model
    path = Path(model.path)
    frames = family_in(path).bounded_frames if (path / "config.json").is_file() else 1
    size = {"shortest_edge": model.min_pixels * frames, "longest_edge": model.max_pixels * frames}
    flags: dict[str, Any] = {
        "model-path": str(path.resolve()) if path.exists() else model.path,
        "host": engine.host,
        "port": placement.port,
        "device": engine.device,
        "dtype": model.dtype,
        "tensor-parallel-size": engine.tensor_parallel,
        "max-running-requests": engine.max_batch,
        "random-seed": recipe.run.seed + placement.index,  # engines with one seed would sample the same tokens
        "mm-process-config": {"image": {"size": size}},
        "weight-version": placement.weight_version,
        "skip-server-warmup": True,  # Pronk's own first request has an image
        "log-level-http": "warning",  # else it logs a line for each turn
        # Caches the pixels of sent images: each turn needs all images so far, and clients leave out cached ones.
        "mm-preprocess-cache-size-mb": IMAGE_CACHE_MB[engine.device],
        "trust-mm-content-hashes": True,  # sent files are still checked (`shared.engine.sent_images`)
        # A server that makes no forward for so long ends itself, and a pause for a publication makes none.
        "watchdog-timeout": PAUSE_S + LIMITS_IN_A_PAUSE * recipe.learner.publish.timeout_s,
    }
    if engine.device == "cpu":
        flags |= _cpu_flags(engine.max_batch * model.max_context)
    else:
        flags |= _gpu_flags(model.dtype)
    if engine.shares_gpu:
        flags |= cache_flags(recipe, gpu_bytes())
    elif engine.mem_fraction:
        flags["mem-fraction-static"] = engine.mem_fraction
    given = {name.lstrip("-").replace("_", "-"): value for name, value in engine.flags.items()}
    for name, value in given.items():
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
    return flags | given


def _gpu_flags(dtype: str) -> dict[str, Any]:
    flags: dict[str, Any] = {"image-processor-backend": "pil"}  # resizes as the learner does; on a GPU it would not
    if dtype == "bfloat16":
        flags["enable-fp32-lm-head"] = True  # logits of 16 to 32 are 0.125 apart in bfloat16
    return flags


def _cpu_flags(tokens: int) -> dict[str, Any]:
    return {
        "attention-backend": "torch_native",
        "disable-overlap-schedule": True,
        "sleep-on-idle": True,  # else its scheduler polls without a pause, on a core that others need
        "max-total-tokens": tokens,
        "mem-fraction-static": 0.1,
    }


def _words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as command line words: True gives a bare flag, False nothing, a list several values, a dict JSON."""
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


def _cores(num_ranks: int) -> dict[str, str]:
    """Return the variable that assigns CPU cores to the ranks, which SGLang needs for more than one rank."""
    if num_ranks == 1 or os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return {}
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::num_ranks] or cores for rank in range(num_ranks)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares)}


ENGINE = SglangEngine()
