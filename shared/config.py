"""One strict recipe: TOML file < environment (PRONK_SECTION__KEY) < command line (--section.key value).

Each process is given only the sections it needs. An unknown key, a wrong type or an impossible combination is a
`ConfigError` of one line that names the value and the cure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Any, Self

from pydantic import BaseModel, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from shared.learner_config import LearnerConfig
from shared.sections import (
    ActorConfig,
    AlarmsConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    MetricsConfig,
    ModelConfig,
    RecordConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    Section,
    TransportConfig,
)
from shared.settings import mistakes
from shared.settings.addresses import port_beside
from shared.settings.cluster import ClusterConfig
from shared.settings.data import SEEDS_END, DataConfig, SamplingConfig

EXIT_USER_ERROR = 2
EXAMPLE = "launch/recipes/colour_tiny.toml"


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
    record: RecordConfig = RecordConfig()
    metrics: MetricsConfig = MetricsConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    transport: TransportConfig = TransportConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def journaled(self) -> bool:
        """Whether an actor that was killed goes on; episodes of a rollout function cannot."""
        return self.actor.journal_mb > 0 and not self.rollout.path

    @model_validator(mode="after")
    def _episodes_fit(self) -> Self:
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
        if self.env.isolation == "process" and self.rollout.path:
            raise ValueError(
                f"env.isolation = 'process' and rollout.path = {self.rollout.path!r}: a rollout function plays in the "
                "actor itself; leave one of them out"
            )
        if self.reward.isolation == "process" and not self.env.reward:
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
        if learner.actor_timeout_s < 2 * actor.heartbeat_s:
            raise ValueError(
                f"learner.actor_timeout_s = {learner.actor_timeout_s}: below two heartbeats of {actor.heartbeat_s} s "
                "every actor seems gone; raise it"
            )
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
        port = 0 if engine.elsewhere else port_beside(bind, engine.host)
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
        data, held_first = self.data, self.data.eval_first_seed
        first, last = data.first_seed, data.first_seed + data.num_samples
        if data.source == "seeds" and held_first + self.eval.samples > SEEDS_END:
            raise ValueError(
                f"data.eval_first_seed = {held_first} with eval.samples = {self.eval.samples}: seeds end below "
                f"{SEEDS_END}; lower one of them"
            )
        if data.source == "seeds" and first < held_first + self.eval.samples and held_first < last:
            raise ValueError(
                f"data.eval_first_seed = {held_first}: held-out seeds overlap the training seeds [{first}, {last}); "
                "move it past them"
            )
        return self


class ConfigError(ValueError):
    """The user's mistake, in one line: the key, the value received, and the cure."""


def load_recipe(path: str, overrides: list[str] | None = None) -> Recipe:
    """The recipe of a TOML file with the environment's and the command line's overrides on top.

    Raises `ConfigError`, in one line, for a missing or broken file, an unknown key (naming the nearest known one), a
    wrong type, and for sections that contradict each other.
    """
    try:
        with open(path, "rb") as file:
            from_file = tomllib.loads(file.read().decode("utf-8-sig"))  # Windows' editors begin it with a mark
    except FileNotFoundError:
        raise ConfigError(f"recipe {path!r} does not exist; the recipes are in launch/recipes/") from None
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
            env_prefix=mistakes.ENV_PREFIX,
            env_nested_delimiter="__",
            cli_implicit_flags=False,
        )

        @classmethod
        def settings_customise_sources(cls, settings_cls, init_settings, env_settings, *_args, **_kwargs):
            command_line: Any = CliSettingsSource(settings_cls, cli_parse_args=overrides or [], cli_exit_on_error=False)
            return command_line, env_settings, init_settings

    if mistake := mistakes.of_overrides(overrides or [], known_fields()):
        raise ConfigError(mistake)
    try:
        settings = Settings(**from_file)
    except SettingsError as error:
        raise ConfigError(mistakes.of_options(str(error), overrides or [], known_fields())) from None
    except ValidationError as error:
        raise ConfigError(mistakes.of_fields(error, path, overrides or [], known_fields())) from None
    return Recipe.model_validate(settings.model_dump())


def new_name(key: str) -> str:
    """What a field of the learner is called that had no section of its own once; empty for any other key."""
    return mistakes.new_name(key, known_fields())


def dotted_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a recipe that is given as nested dicts."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = prefix + name
        inner = isinstance(value, Mapping) and key not in known_fields()
        found |= dotted_values(value, f"{key}.") if inner else {key: value}
    return found


@cache
def known_fields(section: type[BaseModel] | None = None, prefix: str = "") -> dict[str, FieldInfo]:
    """Dotted key -> field, of a whole recipe unless a section is given."""
    found: dict[str, FieldInfo] = {}
    for name, info in (section or Recipe).model_fields.items():
        nested = isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        found |= known_fields(info.annotation, f"{prefix}{name}.") if nested else {prefix + name: info}  # type: ignore[arg-type]
    return found


def field_table() -> str:
    """All fields of a recipe as a Markdown table: `python -m shared.config`."""
    return table_of(known_fields())


def table_of(fields: Mapping[str, FieldInfo]) -> str:
    rows = ["| field | default | |", "|---|---|---|"]
    for key, info in fields.items():
        default = "required" if info.is_required() else json.dumps(info.get_default(call_default_factory=True))
        rows.append(f"| `{key}` | {default} | {info.description or ''} |")
    return "\n".join(rows)


def recipe_parser(description: str | None, *, required: bool = True) -> argparse.ArgumentParser:
    """Knows `--config`; a command adds the options of its own."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any field of the recipe can be overridden: --learner.optimizer.lr 2e-6 --env.max_turns 4",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=required, metavar="R.toml", help="recipe; see launch/recipes/")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> tuple[Recipe, argparse.Namespace]:
    """The recipe with its overrides, and the command's options, with the overrides as they were written. Exits with one
    line on a mistake."""
    options, overrides = parser.parse_known_args(argv)
    options.overrides = overrides
    return load(options.config, overrides), options


def load(path: str, overrides: list[str]) -> Recipe:
    try:
        return load_recipe(path, overrides)
    except ConfigError as error:
        sys.exit(fail(error))


def fail(error: Exception) -> int:
    """Prints a user's mistake in one line; returns the exit code."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    print(field_table())
