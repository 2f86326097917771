"""One strict recipe: TOML file < environment (PRONK_SECTION__KEY) < command line (--section.key value).

Each process is given only the sections it needs. An unknown key, a wrong type or an impossible combination is a
`ConfigError` of one line that names the value and the cure.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from shared.learner_config import LearnerConfig, Section

__all__ = ["ConfigError", "LearnerConfig", "Recipe", "Section", "load_recipe"]


class RunConfig(Section):
    name: str = Field("run", description="name of the run; its folder is DIR/NAME")
    dir: str = Field("runs", description="where run folders are made")
    seed: int = Field(0, description="seed of the run: samples, sampling, initialisation of the value head")


class ModelConfig(Section):
    path: str = Field(..., description="folder or hub name of a Qwen-VL model with tokenizer and chat template")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of forward and backward")
    max_context: int = Field(2048, gt=0, description="tokens of one episode, images expanded")
    min_pixels: int = Field(1024, gt=0, description="images below are enlarged")
    max_pixels: int = Field(1048576, gt=0, description="images above are reduced")


class EnvConfig(Section):
    module: str = Field(..., description="dotted path or .py file that holds build_env")
    args: dict[str, Any] = Field(default_factory=dict, description="settings handed to build_env as `args`")
    max_turns: int = Field(8, gt=0, description="turns of one episode")
    max_tokens: int = Field(1536, gt=0, description="model tokens of one episode")
    turn_tokens: int = Field(256, gt=0, description="model tokens of one turn")
    timeout_s: float = Field(30.0, gt=0, description="time limit of one reset or step")
    threads: int = Field(
        2, gt=0, description="steps and rewards that one actor computes at once; more for those that wait for others"
    )
    reward: str = Field("", description="episode reward: dotted path or .py file:function; empty = the env's own")
    max_failure_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="the run stops when env or reward fails in more of the last 256 episodes; 1 = never",
    )


class RewardConfig(Section):
    url: str = Field("", description="server that is posted each episode as JSON and answers its reward; empty = none")
    timeout_s: float = Field(30.0, gt=0, description="time limit of env.reward, or of one request to the server")
    tries: int = Field(3, gt=0, description="requests to the server before the episode counts as failed")


class RolloutConfig(Section):
    path: str = Field("", description="async function that plays episodes: dotted path or .py file:function")
    timeout_s: float = Field(600.0, gt=0, description="time limit of one episode that it plays")


class DataConfig(Section):
    source: str = Field("seeds", description="`seeds` (each sample is a seed) or a .parquet/.jsonl file")
    first_seed: int = Field(0, description="first training seed")
    num_samples: int = Field(1_000_000_000, gt=0, description="number of training seeds")
    eval_first_seed: int = Field(2_000_000_000, description="first held-out seed; never overlaps the training seeds")
    eval_source: str = Field("", description="held-out dataset, when `source` is a file")


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0, description="of training and of sampled evaluations")
    top_p: float = Field(1.0, gt=0, le=1, description="only 1: the engine's logprobs are of the full distribution")
    top_k: int = Field(-1, description="only -1, for the same reason")


class ActorConfig(Section):
    learner: str = Field("tcp://127.0.0.1:5555", description="address of the learner's ticket socket")
    processes: int = Field(1, gt=0, description="actor processes that launch/actors.py starts")
    groups: int = Field(16, gt=0, description="groups that one process plays at once")
    connect_timeout_s: float = Field(60.0, gt=0, description="how long an actor waits for the learner at first")
    reconnect_timeout_s: float = Field(600.0, gt=0, description="how long it waits for a learner that has gone silent")
    max_restarts: int = Field(10, ge=0, description="times within an hour that one actor process is started again")
    heartbeat_s: float = Field(2.0, gt=0, description="seconds between an actor's signs of life")


class EngineConfig(Section):
    kind: Literal["embedded", "sglang"] = Field("embedded", description="which server launch/actors.py starts")
    urls: tuple[str, ...] = Field((), description="engines that run already; empty = start them")
    router: str = Field("", description="router before engine.urls: episodes go through it, weights to each of urls")
    count: int = Field(1, gt=0, description="engines to start")
    host: str = Field("127.0.0.1", description="address of this host where its engines listen, and the learner calls")
    port: int = Field(31000, gt=0, lt=65536, description="port of the first engine; the next ones follow")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the engines compute")
    gpus: tuple[int, ...] = Field((), description="cuda: GPUs that the engines share out; empty = the first ones")
    max_batch: int = Field(64, gt=0, description="requests that an engine computes at once")
    threads: int = Field(1, gt=0, description="CPU threads of an engine")
    api_key_file: str = Field("", description="file of the key that engines ask for (mode 0600); empty = they ask none")
    tensor_parallel: int = Field(1, gt=0, description="sglang: GPUs of one engine")
    mem_fraction: float = Field(0.0, ge=0, lt=1, description="sglang: share of GPU memory it takes; 0 = its own choice")
    attention_backend: str = Field("", description="sglang: empty = its own choice")
    mm_attention_backend: str = Field("", description="sglang: of the vision tower; sdpa on B200")
    flags: dict[str, Any] = Field(default_factory=dict, description="sglang: any other flags of its server")
    sglang_env: str = Field(".venv-sglang", description="sglang: the environment that make sglang-env builds")
    stage_weights: Literal["auto", "on", "off"] = Field(
        "auto", description="sglang: receives weights beside generation, in host memory; auto = where it runs on a CPU"
    )
    start_timeout_s: float = Field(300.0, gt=0, description="how long an engine may take until its first answer")
    request_timeout_s: float = Field(300.0, gt=0, description="longest wait for one turn")
    silent_timeout_s: float = Field(
        120.0, gt=0, description="an engine of launch/actors.py that answers nothing for so long is started again"
    )
    max_restarts: int = Field(3, ge=0, description="an engine that ended is started again so often within an hour")


class EvalConfig(Section):
    every_steps: int = Field(0, ge=0, description="0 = only before and after training")
    samples: int = Field(0, ge=0, description="held-out samples; 0 = no evaluation")
    greedy: bool = Field(False, description="also evaluate greedily before and after")
    repeats: int = Field(
        1, gt=0, description="episodes of each held-out sample: gives mean and pass@k; greedy plays one"
    )
    best: str = Field("success", description="metric by which the best evaluated checkpoint is kept; empty = none is")


class TransportConfig(Section):
    max_message_bytes: int = Field(256 * 2**20, gt=0, description="larger messages are refused")
    queue_messages: int = Field(64, gt=0, description="messages a socket holds before it refuses more")
    keys: str = Field("", description="folder of keys, made by python -m shared.keys; needed off loopback")
    key_name: str = Field("actor", description="which actor's key of that folder this host has")
    allow_plain: bool = Field(False, description="off loopback without keys: only where everybody is trusted")


class Recipe(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    env: EnvConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    actor: ActorConfig = ActorConfig()
    engine: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    transport: TransportConfig = TransportConfig()


class ConfigError(ValueError):
    """The user's mistake, in one line: the key, the value received, and the cure."""


def load_recipe(path: str, overrides: list[str] | None = None) -> Recipe:
    """The recipe of a TOML file with the environment's and the command line's overrides on top.

    Raises `ConfigError`, in one line, for a missing or broken file, an unknown key (naming the nearest known one), a
    wrong type, and for sections that contradict each other.
    """
    try:
        with open(path, "rb") as file:
            from_file = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"recipe {path!r} does not exist; the recipes are in launch/recipes/") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path!r} is not valid TOML: {error}") from None

    class Settings(BaseSettings, Recipe):
        model_config = SettingsConfigDict(
            extra="forbid", frozen=True, env_prefix="PRONK_", env_nested_delimiter="__", cli_implicit_flags=False
        )

        @classmethod
        def settings_customise_sources(cls, settings_cls, init_settings, env_settings, *_args, **_kwargs):
            command_line: Any = CliSettingsSource(settings_cls, cli_parse_args=overrides or [], cli_exit_on_error=False)
            return command_line, env_settings, init_settings

    try:
        settings = Settings(**from_file)
    except SettingsError as error:
        raise ConfigError(_command_line_error(str(error))) from None
    except ValidationError as error:
        raise ConfigError(_first_line(error, path)) from None
    recipe = Recipe.model_validate(settings.model_dump())
    check_consistency(recipe)
    return recipe


def check_consistency(recipe: Recipe) -> None:
    """Raises `ConfigError` where two settings contradict each other."""
    env, model, learner, actor = recipe.env, recipe.model, recipe.learner, recipe.actor
    if env.turn_tokens > env.max_tokens:
        raise ConfigError(f"env.turn_tokens = {env.turn_tokens} exceeds env.max_tokens = {env.max_tokens}; lower it")
    if env.turn_tokens >= model.max_context:
        raise ConfigError(
            f"env.turn_tokens = {env.turn_tokens} leaves no room in model.max_context = {model.max_context}; lower it"
        )
    if env.reward and recipe.reward.url:
        raise ConfigError(f"env.reward = {env.reward!r} and reward.url = {recipe.reward.url!r}: leave one of them out")
    relative = learner.objective != "vtrace"
    if relative and learner.group_size < 2:
        raise ConfigError(
            f"learner.group_size = {learner.group_size}: {learner.objective} compares episodes of one sample; set >= 2"
        )
    if learner.dynamic_sampling and not relative:
        raise ConfigError("learner.dynamic_sampling = true is for group-relative objectives; set learner.objective")
    if recipe.sampling.top_p < 1.0 or recipe.sampling.top_k != -1:
        raise ConfigError(
            f"sampling.top_p = {recipe.sampling.top_p}, top_k = {recipe.sampling.top_k}: truncated sampling makes the "
            "behaviour logprobs untrue; set top_p = 1 and top_k = -1"
        )
    if recipe.sampling.temperature == 0:
        raise ConfigError("sampling.temperature = 0: a greedy policy explores nothing; set it above 0")
    if learner.actor_timeout_s < 2 * actor.heartbeat_s:
        raise ConfigError(
            f"learner.actor_timeout_s = {learner.actor_timeout_s}: below two heartbeats of {actor.heartbeat_s} s every "
            "actor seems gone; raise it"
        )
    reach = (learner.max_staleness + 1) * learner.publish_every * learner.groups_per_step
    if actor.processes * actor.groups > 4 * reach:
        raise ConfigError(
            f"actor.processes x actor.groups = {actor.processes * actor.groups} places, but the staleness bound admits "
            f"{reach} groups at once; lower actor.groups or raise learner.max_staleness"
        )
    if recipe.engine.router and not recipe.engine.urls:
        raise ConfigError(f"engine.router = {recipe.engine.router!r}: name the engines behind it in engine.urls")
    if recipe.data.source == "seeds":
        first, last = recipe.data.first_seed, recipe.data.first_seed + recipe.data.num_samples
        held_first, held_last = recipe.data.eval_first_seed, recipe.data.eval_first_seed + recipe.eval.samples
        if first < held_last and held_first < last:
            raise ConfigError(
                f"data.eval_first_seed = {held_first}: held-out seeds overlap the training seeds [{first}, {last}); "
                "move it past them"
            )


def nearest_key(key: str, known: list[str]) -> str:
    """The known key most like `key`, or an empty string."""
    matches = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return matches[0] if matches else ""


def known_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """All dotted keys of a recipe."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        nested = isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        keys += known_keys(info.annotation, f"{prefix}{name}.") if nested else [prefix + name]  # type: ignore[arg-type]
    return keys


def _first_line(error: ValidationError, path: str) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        near = nearest_key(key, known_keys() + list(Recipe.model_fields))
        cure = f"did you mean {near!r}?" if near else f"sections are {', '.join(Recipe.model_fields)}"
        return f"recipe {path!r}: unknown key {key!r}; {cure}"
    if first["type"] == "missing":
        return f"recipe {path!r}: {key!r} is required; set it in the recipe or with --{key}"
    return f"recipe {path!r}: {key} = {first['input']!r}: {first['msg'].lower()}"


def _command_line_error(message: str) -> str:
    unknown = re.search(r"unrecognized arguments: (.*)", message)
    if unknown:
        key = unknown.group(1).split()[0].lstrip("-").split("=")[0]
        near = nearest_key(key, known_keys())
        return f"unknown option --{key}" + (
            f"; did you mean --{near}?" if near else "; options are --section.key VALUE"
        )
    return "command line: " + " ".join(message.split())


def field_table() -> str:
    """All fields of a recipe as a Markdown table: `python -m shared.config`."""
    rows = ["| field | default | |", "|---|---|---|"]
    for section, info in Recipe.model_fields.items():
        for name, inner in info.annotation.model_fields.items():  # type: ignore[union-attr]
            default = "required" if inner.is_required() else inner.get_default(call_default_factory=True)
            text = default if default == "required" else json.dumps(default)
            rows.append(f"| `{section}.{name}` | {text} | {inner.description or ''} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(field_table())
