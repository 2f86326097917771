"""One strict recipe: TOML file < environment (PRONK_SECTION__KEY) < command line (--section.key value).

Each process is given only the sections it needs. An unknown key, a wrong type or an impossible combination is a
`ConfigError` of one line that names the value and the cure.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self, get_origin

from pydantic import (
    BaseModel,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from shared.config import errors
from shared.config.cluster_section import ClusterConfig
from shared.config.data_section import HELD_OUT_FIRST_SEED, DataConfig, SamplingConfig
from shared.config.learner_section import LearnerConfig
from shared.config.pools_section import KEPT, PoolConfig, check_pools
from shared.config.recipe_paths import beside, with_paths
from shared.config.reward_section import RewardConfig
from shared.config.sections import (
    PLAYERS,
    ActorConfig,
    AlarmsConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    MetricsConfig,
    ModelConfig,
    RecordConfig,
    RolloutConfig,
    RunConfig,
    Section,
    TraceConfig,
    TransportConfig,
)
from shared.config.tasks_section import TaskConfig, check_names
from shared.redaction import redact, redact_text
from shared.util.dotted_options import with_json_options
from shared.wire.transports import transport_of

EXIT_USER_ERROR = 2
ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "launch" / "recipes"
EXAMPLE = "launch/recipes/colour_tiny.toml"
MAIN_FIELDS = (
    *("run.name", "run.seed", "model.path", "model.dtype", "model.max_context"),
    *("env.module", "env.args", "env.max_turns", "env.max_tokens", "env.turn_tokens", "env.reward"),
    *("data.source", "data.eval_source", "eval.samples", "eval.every_steps"),
    *("actor.groups", "engine.kind", "engine.count", "engine.device", "engine.tensor_parallel"),
    *("learner.device", "learner.group_size", "learner.groups_per_step", "learner.total_steps"),
    *("learner.max_staleness", "learner.objective.name", "learner.optimizer.lr", "learner.lora.rank"),
    *("learner.checkpoint.every", "learner.parallel.microbatch_tokens", "learner.guard.max_kl"),
)
"""The fields that matter to most runs; the reference shows them first."""
WITH_SECRETS = {"secrets": True}
"""The context of `model_dump(mode="json")` for a process that plays with the recipe."""
NO_ENV = "envs.no_env"


class Recipe(Section):
    """A recipe as it was resolved, from the file, the environment and the command line together:
    `recipe.learner.total_steps` is the field learner.total_steps."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    env: EnvConfig = EnvConfig()
    tasks: tuple[TaskConfig, ...] = Field(
        (),
        max_length=32,
        description="several tasks in one run, instead of env.module, env.args, env.reward, reward.url and data",
    )
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    data: DataConfig = DataConfig()
    pools: tuple[PoolConfig, ...] = Field(
        (), max_length=16, description="difficulty pools: how often a sample is played, by its mean reward; empty = all"
    )
    sampling: SamplingConfig = SamplingConfig()
    actor: ActorConfig = ActorConfig()
    engine: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    record: RecordConfig = RecordConfig()
    trace: TraceConfig = TraceConfig()
    metrics: MetricsConfig = MetricsConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    transport: TransportConfig = TransportConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_serializer(mode="wrap", when_used="json")
    def _without_secrets(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Return the recipe as JSON values without its secrets: this form goes into the run's folder, into checkpoints
        and to services. They stay in it with the context `WITH_SECRETS`."""
        values: dict[str, Any] = handler(self)
        return values if (info.context or {}).get("secrets") else redact(values)

    @property
    def most_turns(self) -> int:
        """The turns of the longest task's episodes."""
        return max((task.max_turns or self.env.max_turns for task in self.tasks), default=self.env.max_turns)

    @property
    def most_tokens(self) -> int:
        """The model tokens of the longest task's episodes."""
        return max((task.max_tokens or self.env.max_tokens for task in self.tasks), default=self.env.max_tokens)

    @property
    def most_turn_tokens(self) -> int:
        """The model tokens of the longest task's turns."""
        return max((task.turn_tokens or self.env.turn_tokens for task in self.tasks), default=self.env.turn_tokens)

    def alone(self, task: TaskConfig) -> Recipe:
        """Return the recipe of one of the tasks by itself. Raise ValidationError if its limits contradict each
        other."""
        env, reward = self.env.model_dump() | task.values_of_env(), {"url": task.reward if task.rewarded_by_url else ""}
        if not env["reward"]:
            reward["isolation"] = "thread"  # there is no function that could be isolated
        group_size = {"group_size": task.group_size or self.learner.group_size}
        own: dict[str, Any] = {
            "tasks": (),
            "pools": (),
            "env": EnvConfig.model_validate(env),
            "data": task.data,
            "reward": self.reward.model_copy(update=reward),
            "learner": self.learner.model_copy(update=group_size),
            "eval": self.eval.model_copy(update={"sets": (), "samples": self.own_held_out(task.name)}),
        }
        return self.model_copy(update=own)

    def own_held_out(self, task: str) -> int:
        """Return how many samples of a task's own held-out data are played at most; "" names the only task."""
        sets = [each for each in self.eval.sets if each.task == task and not each.source]
        return max(
            (each.samples or self.eval.samples for each in sets), default=0 if self.eval.sets else self.eval.samples
        )

    @property
    def journaled(self) -> bool:
        """True if actors keep a journal, from which a killed actor continues its episodes. Not possible with a rollout
        function or an agent."""
        return self.actor.journal_mb > 0 and not self.rollout.function

    @model_validator(mode="before")
    @classmethod
    def _actors_meet_the_learner(cls, values: Any) -> Any:
        """Give actors that are told no learner the port of the one that is to listen, on this host."""
        if not isinstance(values, dict) or not isinstance(values.get("learner"), dict):
            return values
        bind, actor = values["learner"].get("bind"), values.get("actor", {})
        port = re.fullmatch(r"tcp://.+:([1-9]\d*)", bind) if isinstance(bind, str) else None
        if port is None or int(port[1]) > 65535 or not isinstance(actor, dict) or "learner" in actor:
            return values
        return {**values, "actor": {**actor, "learner": f"tcp://127.0.0.1:{port[1]}"}}

    @model_validator(mode="before")
    @classmethod
    def _an_agent_needs_no_environment(cls, values: Any) -> Any:
        """Give an agent's samples, if no module is named that explains them, the one in which nothing happens."""
        parts = [values.get(name) or {} for name in ("rollout", "env", "tasks")] if isinstance(values, dict) else []
        if not parts or not all(isinstance(part, dict) for part in parts[:2]) or parts[2]:
            return values
        rollout, env = parts[:2]
        by_agents = any(rollout.get(name) for name in PLAYERS[1:])
        return values if not by_agents or env.get("module") else {**values, "env": {**env, "module": NO_ENV}}

    @model_validator(mode="after")
    def _there_is_a_task(self) -> Self:
        env = self.env
        if not self.tasks:
            if not env.module:
                raise ValueError("'env.module' is required; set it in the recipe or with --env.module")
            return self
        one = {"env.module": env.module, "env.args": env.args, "env.reward": env.reward, "reward.url": self.reward.url}
        for name, value in one.items():
            if value:
                raise ValueError(f"{name} = {value!r} together with [[tasks]]: each task has its own; leave one out")
        if self.data != DataConfig():
            name = next(n for n, field in DataConfig.model_fields.items() if getattr(self.data, n) != field.default)
            raise ValueError(
                f"data.{name} = {getattr(self.data, name)!r} together with [[tasks]]: each task has its own `data`; "
                "move it there"
            )
        check_names("tasks", [task.name for task in self.tasks])
        return self

    @model_validator(mode="after")
    def _held_out_sets_are_of_tasks(self) -> Self:
        check_names("eval.sets", [each.name for each in self.eval.sets])
        names = [task.name for task in self.tasks]
        for each in self.eval.sets:
            place = f"eval.sets: {each.name!r}"
            if each.task and each.task not in names:
                cure = f"the tasks are {', '.join(names)}" if names else "the recipe has no [[tasks]]; leave it out"
                raise ValueError(f"{place} is of the task {each.task!r}, which is not there; {cure}")
            if names and not each.task:
                raise ValueError(f"{place} names no task; set task to one of {', '.join(names)}")
            if not each.samples and not self.eval.samples:
                raise ValueError(f"{place} has no samples: set its samples, or eval.samples")
            if each.source and each.env_config:
                raise ValueError(f"{place} has a source and env_config: rows have their own; leave one out")
        return self

    @model_validator(mode="after")
    def _pools_have_samples_that_come_again(self) -> Self:
        check_names("pools", [pool.name for pool in self.pools])
        check_pools(self.pools)
        data = [task.data for task in self.tasks] or [self.data]
        endless = all(each.source == "seeds" and each.num_samples > KEPT for each in data)
        if self.pools and endless:
            raise ValueError(
                f"pools with data.num_samples = {data[0].num_samples}: no run plays a seed again, so that its rewards "
                f"tell nothing; set data.num_samples to {KEPT} at most"
            )
        return self

    @model_validator(mode="after")
    def _each_task_is_sound(self) -> Self:
        for task in self.tasks:
            try:
                Recipe.model_validate(self.alone(task).model_dump())
            except ValidationError as error:
                first = error.errors()[0]
                why = first.get("ctx", {}).get("error", f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}")
                raise ValueError(f"task {task.name!r}: {why}") from None
        return self

    @model_validator(mode="after")
    def _episodes_fit(self) -> Self:
        if self.tasks:  # of each by itself
            return self
        env, model = self.env, self.model
        if env.turn_tokens >= model.max_context:
            room = f"model.max_context = {model.max_context}"
            raise ValueError(f"env.turn_tokens = {env.turn_tokens} leaves no room in {room}; lower it")
        whole = self.learner.objective.overlong_tokens
        if whole > env.max_tokens:
            raise ValueError(
                f"learner.objective.overlong_tokens = {whole}: an episode is cut off at env.max_tokens = "
                f"{env.max_tokens}; lower it to that"
            )
        if env.reward and self.reward.url:
            raise ValueError(f"env.reward = {env.reward!r} and reward.url = {self.reward.url!r}: leave one of them out")
        return self

    @model_validator(mode="after")
    def _there_is_something_to_isolate(self) -> Self:
        rollout = self.rollout
        if self.env.isolation == "process" and rollout.path:
            raise ValueError(
                f"env.isolation = 'process' and rollout.path = {rollout.path!r}: a rollout function plays in the "
                "actor itself; leave one of them out"
            )
        if self.env.isolation == "process" and rollout.by_agents:
            raise ValueError(
                f"env.isolation = 'process' and {rollout.by_agents}: an agent plays no environment of the actor's; "
                "leave env.isolation out"
            )
        for name in ("history", "keep_images"):
            if rollout.by_agents and (value := getattr(self.env, name)) != "all":
                raise ValueError(
                    f"env.{name} = {value} and {rollout.by_agents}: an agent decides what it sends; "
                    f"leave env.{name} out"
                )
        if rollout.function and self.learner.objective.turn_advantage == "state":
            raise ValueError(
                f"learner.objective.turn_advantage = 'state', and {rollout.function} plays: only turns of an "
                "environment that the actor plays have states; set that to 'returns'"
            )
        if self.reward.isolation == "process" and not (self.env.reward or self.tasks):
            raise ValueError(
                "reward.isolation = 'process' without env.reward: the environment's own reward runs where "
                "env.isolation says; set that"
            )
        return self

    @model_validator(mode="after")
    def _actors_and_engines_fit_the_learner(self) -> Self:
        learner, actor = self.learner, self.actor
        if why := learner.lora.unsendable(self.engine, learner.device):
            raise ValueError(why)
        reach = (learner.max_staleness + 1) * learner.publish.every * learner.groups_per_step
        if actor.processes * actor.groups > 4 * reach:
            raise ValueError(
                f"actor.processes x actor.groups = {actor.processes * actor.groups} places, but the staleness bound "
                f"admits {reach} groups at once; lower actor.groups or raise learner.max_staleness"
            )
        if not actor.groups and not self.engine.count and not self.engine.urls:
            raise ValueError("actor.groups = 0 and engine.count = 0: nobody would play or generate; raise one of them")
        return self

    @model_validator(mode="after")
    def _engines_leave_the_learner_its_port(self) -> Self:
        engine, bind = self.engine, self.learner.bind
        port = 0 if engine.elsewhere else transport_of("learner.bind", bind).taken_port(bind, engine.host)
        if engine.port <= port < engine.port + engine.count:
            raise ValueError(
                f"engine.port = {engine.port} with engine.count = {engine.count}: port {port} is the learner's "
                f"(learner.bind = {bind!r}); choose another one"
            )
        return self

    @model_validator(mode="after")
    def _what_is_evaluated_is_published(self) -> Self:
        steps, every = self.eval.every_steps, self.learner.publish.every
        if steps % every:
            raise ValueError(
                f"eval.every_steps = {steps}: the engines have the weights of that step only after a publication; make "
                f"it a multiple of learner.publish.every = {every}"
            )
        return self

    @model_validator(mode="after")
    def _held_out_seeds_are_apart(self) -> Self:
        data, held_first = self.data, HELD_OUT_FIRST_SEED
        if self.tasks:  # of each by itself
            return self
        first, last = data.first_seed, data.first_seed + data.num_samples
        count = self.own_held_out("")
        if data.source == "seeds" and first < held_first + count and held_first < last:
            raise ValueError(
                f"data.first_seed = {first} with data.num_samples = {data.num_samples}: training seeds overlap the "
                f"{count} held-out seeds from {held_first} on; lower one of them"
            )
        return self


class ConfigError(ValueError):
    """A mistake of the user's, in one line: the key, the value received, and the cure."""


def recipe_path(name: str) -> str:
    """Return the path of a recipe that is given by its path, or by the name of one in launch/recipes. Raise
    ConfigError, which names the nearest one, if there is none."""
    for path in (Path(name), RECIPES / name, RECIPES / f"{name}.toml"):
        if path.is_file():
            return str(path)
    names = sorted(path.stem for path in RECIPES.glob("*.toml"))
    near = difflib.get_close_matches(Path(name).stem, names, n=1)
    cure = f"did you mean {near[0]}?" if near else f"the recipes in launch/recipes are {', '.join(names)}"
    raise ConfigError(f"recipe {name!r} does not exist; {cure}")


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Load a recipe, given by its path or by the name of one in launch/recipes, with overrides from the environment and
    the command line.

    Raise `ConfigError`, in one line, for a missing or broken file, an unknown key (naming the nearest known one), a
    wrong type, and for sections that contradict each other.
    """
    path = name if Path(name).exists() else recipe_path(name)
    overrides = with_json_options(overrides or [], free_fields())
    try:
        with open(path, "rb") as file:
            from_file = tomllib.loads(file.read().decode("utf-8-sig"))  # editors on Windows put a byte order mark first
    except OSError as error:
        raise ConfigError(f"recipe {path!r} cannot be read: {error.strerror}; give a file like {EXAMPLE}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"recipe {path!r} is no text in UTF-8; give a file like {EXAMPLE}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path!r} is not valid TOML: {error}") from None

    class Settings(BaseSettings, Recipe):
        model_config = SettingsConfigDict(
            extra="forbid",
            frozen=True,
            env_prefix=errors.ENV_PREFIX,
            env_nested_delimiter="__",
            cli_implicit_flags=False,
        )

        @classmethod
        def settings_customise_sources(cls, settings_cls, init_settings, env_settings, *_args, **_kwargs):
            command_line: Any = CliSettingsSource(settings_cls, cli_parse_args=overrides, cli_exit_on_error=False)
            return command_line, env_settings, init_settings

    if mistake := errors.describe_ignored(overrides, known_fields()):
        raise ConfigError(mistake)
    try:
        settings = Settings(**beside(from_file, Path(path).parent))
    except SettingsError as error:
        raise ConfigError(errors.describe_unreadable_option(str(error), overrides, known_fields())) from None
    except ValidationError as error:
        raise ConfigError(errors.describe_invalid_field(error, path, overrides, known_fields())) from None
    return Recipe.model_validate(with_paths(settings.model_dump()))


def dotted_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a recipe, given as nested dicts, by dotted key."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = prefix + name
        inner = isinstance(value, Mapping) and key not in known_fields()
        found |= dotted_values(value, f"{key}.") if inner else {key: value}
    return found


@cache
def known_fields(section: type[BaseModel] | None = None, prefix: str = "") -> dict[str, FieldInfo]:
    """Return the fields by dotted key: those of `section`, by default of the whole recipe."""
    found: dict[str, FieldInfo] = {}
    for name, info in (section or Recipe).model_fields.items():
        nested = isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        found |= known_fields(info.annotation, f"{prefix}{name}.") if nested else {prefix + name: info}  # type: ignore[arg-type]
    return found


def free_fields() -> list[str]:
    """Return the fields that hold values by names of the user's, by dotted key."""
    return [key for key, info in known_fields().items() if get_origin(info.annotation) is dict]


def field_table() -> str:
    """Format all fields of a recipe as Markdown, a table for each section: `python -m shared.config` prints it."""
    sections: dict[str, dict[str, FieldInfo]] = {}
    for key, info in known_fields().items():
        sections.setdefault(key.rpartition(".")[0], {})[key] = info
    lists = {name: fields for name, info in known_fields().items() if (fields := errors.fields_of_items(info))}
    parts = [f"## [{name}]\n\n{table_of(fields)}" for name, fields in sections.items() if name]
    return "\n\n".join([*parts, *(f"## [[{name}]]\n\n{table_of(fields)}" for name, fields in lists.items())])


def table_of(fields: Mapping[str, FieldInfo]) -> str:
    rows = ["| field | default | |", "|---|---|---|"]
    for key, info in fields.items():
        value = {} if info.is_required() else info.get_default(call_default_factory=True)
        default = "required" if info.is_required() else json.dumps({} if isinstance(value, BaseModel) else value)
        rows.append(f"| `{key}` | {default} | {info.description or ''} |")
    return "\n".join(rows)


def recipe_parser(description: str | None, *, required: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the option `--config`, to which a command adds its own options."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any field of the recipe can be overridden: --learner.optimizer.lr 2e-6 --env.max_turns 4",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", required=required, metavar="RECIPE", help="a recipe's path, or the name of one in launch/recipes"
    )
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> tuple[Recipe, argparse.Namespace]:
    """Parse the command line; return the recipe with its overrides, and the command's options, whose `overrides` are
    the arguments of the overrides as written. Exit with a one-line error on a mistake."""
    options, overrides = parser.parse_known_args(argv)
    options.overrides = overrides
    return load(options.config, overrides), options


def load(path: str, overrides: list[str]) -> Recipe:
    try:
        return load_recipe(path, overrides)
    except ConfigError as error:
        sys.exit(fail(error))


def fail(error: Exception) -> int:
    """Print an error of the user's in one line and return the exit code."""
    print("error: " + redact_text(" ".join(str(error).split())), file=sys.stderr, flush=True)
    return EXIT_USER_ERROR
