"""The sections of a recipe. Those of the learner, except GuardConfig, are in shared/config/learner_section.py."""

from __future__ import annotations

import re
import shlex
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_serializer, field_validator, model_validator

from shared.engine.engine_kinds import DEFAULT_KIND, capabilities_of
from shared.wire.transports import checked_address


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunConfig(Section):
    name: str = Field("run", pattern=r"^[^/.][^/]*$", description="its folder is DIR/NAME: no / and no leading dot")
    dir: str = Field("runs", description="where run folders are made")
    seed: int = Field(0, description="seed of the run: samples, sampling, initialisation of the value head")


class ModelConfig(Section):
    path: str = Field(..., min_length=1, description="folder or hub name of a model with tokenizer and chat template")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of forward and backward")
    max_context: int = Field(2048, gt=0, description="tokens of one episode, images expanded")
    min_pixels: int = Field(1024, gt=0, description="pixels: smaller images are enlarged")
    max_pixels: int = Field(1048576, gt=0, description="pixels: larger images are reduced")

    @model_validator(mode="after")
    def _an_area_fits(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"model.min_pixels = {self.min_pixels} exceeds model.max_pixels = {self.max_pixels}; lower it"
            )
        return self


class EnvConfig(Section):
    module: str = Field(
        "",
        description="dotted path or .py file that holds build_env; required without [[tasks]], unless agents play",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="settings handed to build_env as `args`")
    max_turns: int = Field(8, gt=0, description="turns of one episode")
    max_tokens: int = Field(1536, gt=0, description="model tokens of one episode")
    turn_tokens: int = Field(256, gt=0, description="model tokens of one turn")
    history: Literal["all"] | PositiveInt = Field(
        "all",
        description="observations that the model sees in each turn after the prompt, the present one among them; where "
        "one is left out, the episode goes on in a new segment",
    )
    keep_images: Literal["all"] | PositiveInt = Field(
        "all",
        description="images of observations that it sees, the last ones; those of the present one always; where one is "
        "left out, a new segment begins likewise",
    )
    timeout_s: float = Field(30.0, gt=0, description="time limit of one reset or step")
    isolation: Literal["thread", "process"] = Field(
        "thread", description="`process`: each environment in a process that is ended when it overruns or crashes"
    )
    memory_mb: int = Field(
        2048, ge=0, description="MiB that one process of an environment or a reward may take (Linux); 0 = any"
    )
    threads: int = Field(
        2, gt=0, description="steps and rewards that one actor computes at once; more for those that wait for others"
    )
    reward: str = Field("", description="episode reward: dotted path or .py file:function; empty = the env's own")
    max_failure_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="an actor is paused if more of its last 256 episodes fail; the run stops if more fail in env or "
        "reward, or do not fit, at all actors; 1 = never",
    )

    @property
    def build_args(self) -> dict[str, Any]:
        """The settings that `build_env` and `system_prompt` get as `args`."""
        return {**self.args, "max_turns": self.max_turns}

    @model_validator(mode="after")
    def _turns_fit(self) -> Self:
        if self.turn_tokens > self.max_tokens:
            raise ValueError(
                f"env.turn_tokens = {self.turn_tokens} exceeds env.max_tokens = {self.max_tokens}; lower it"
            )
        return self


PLAYERS = ("path", "agent", "command", "listen")
"""Fields of `rollout` that name what plays in place of the environment; all but the first are agents."""


class RolloutConfig(Section):
    path: str = Field("", description="async function that plays episodes: dotted path or .py file:function")
    agent: str = Field(
        "",
        description="function `run(base_url, sample, args)`, plain or async, that plays episodes through an endpoint "
        "with OpenAI's and Anthropic's API and returns the reward or None: dotted path or .py file:function",
    )
    command: str = Field(
        "",
        description="program that plays an episode in the same way, in any language: its words as a shell takes them; "
        "it finds its base URL in PRONK_BASE_URL, and prints its reward",
    )
    listen: str = Field(
        "",
        description="HOST:PORT at which the first actor serves its episodes to agents elsewhere, in place of "
        "rollout.agent; the next actors have the ports that follow",
    )
    api_key_file: str = Field(
        "",
        description="file with the key that such agents send (mode 0600); needed where rollout.listen is not loopback",
    )
    timeout_s: float = Field(600.0, gt=0, description="time limit of one episode that one of them plays")

    @property
    def function(self) -> str:
        """Return what plays episodes in place of the environment; "" if there is nothing."""
        return next((value for name in PLAYERS if (value := getattr(self, name))), "")

    @property
    def by_agents(self) -> str:
        """Return what makes agents play, as `field = value`; "" if none do."""
        return next((f"rollout.{name} = {value!r}" for name in PLAYERS[1:] if (value := getattr(self, name))), "")

    def address(self, index: int) -> tuple[str, int]:
        """Return host and port at which an actor listens for agents elsewhere."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port) + index

    @field_validator("command")
    @classmethod
    def _has_words(cls, value: str) -> str:
        try:
            is_empty = value != "" and not shlex.split(value)
        except ValueError as error:
            raise ValueError(f"rollout.command = {value!r}: {error}; close what is quoted") from None
        if is_empty:
            raise ValueError(f"rollout.command = {value!r} names no program: name one, or leave it out")
        return value

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if value and not re.fullmatch(r"[^\s/:]+:[1-9]\d{0,4}|\[[0-9a-fA-F:.]+\]:[1-9]\d{0,4}", value):
            raise ValueError(f"rollout.listen = {value!r}: write it as HOST:PORT, such as 127.0.0.1:8600")
        if value:
            checked_address("rollout.listen", f"tcp://{value}")
        return value

    @model_validator(mode="after")
    def _one_of_them_plays(self) -> Self:
        named = [(name, value) for name in PLAYERS if (value := getattr(self, name))]
        if len(named) > 1:
            (first, one), (second, other) = named[:2]
            raise ValueError(f"rollout.{first} = {one!r} and rollout.{second} = {other!r}: leave one of them out")
        if self.api_key_file and not self.listen:
            raise ValueError(f"rollout.api_key_file = {self.api_key_file!r} without rollout.listen: leave it out")
        return self


class ActorConfig(Section):
    learner: str = Field("tcp://127.0.0.1:5555", description="address of the learner's ticket socket")
    processes: int = Field(1, gt=0, description="actor processes that launch/actors.py starts")
    groups: int = Field(
        16, ge=0, description="groups that one process plays at once; 0 = none: it only names its host's engines"
    )
    connect_timeout_s: float = Field(60.0, gt=0, description="how long an actor waits for the learner at first")
    max_restarts: int = Field(10, ge=0, description="times within an hour that one actor process is started again")
    journal_mb: int = Field(
        64,
        ge=0,
        description="MiB of disk in which an actor keeps what it goes on from after it was killed; 0 = nothing",
    )

    @field_validator("learner")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        return checked_address("actor.learner", value)


class EngineConfig(Section):
    kind: str = Field(
        DEFAULT_KIND,
        description="server that launch/actors.py starts: embedded, sglang, or the path of a module of yours",
    )
    urls: tuple[str, ...] = Field((), description="engines that run already; empty = start them")
    router: str = Field(
        "", description="router in front of engine.urls: episodes use it, weights go to each of urls directly"
    )
    count: int = Field(1, ge=0, description="engines to start; 0 = none: actors play on those that the learner names")
    host: str = Field("127.0.0.1", description="address of this host where its engines listen, and the learner calls")
    port: int = Field(31000, gt=0, lt=65536, description="port of the first engine; the next ones follow")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the engines compute")
    gpus: tuple[int, ...] = Field((), description="cuda: GPUs that the engines share out; empty = the last ones")
    max_batch: int = Field(64, gt=0, description="requests that an engine computes at once")
    threads: int = Field(1, gt=0, description="CPU threads of an engine")
    api_key_file: str = Field("", description="file with the API key that engines require (mode 0600); empty = no key")
    tensor_parallel: int = Field(1, gt=0, description="sglang: GPUs of one engine")
    mem_fraction: float = Field(0.0, ge=0, lt=1, description="share of GPU memory for the engine; 0 = its own choice")
    shares_gpu: bool = Field(
        False, description="the one engine is on the GPU of the learner's one rank, and has mem_fraction of it"
    )
    flags: dict[str, Any] = Field(default_factory=dict, description="sglang: any other flags of its server")
    sglang_env: str = Field(".venv-sglang", description="sglang: its environment (make sglang-env, pronk engine-env)")
    stage_weights: Literal["auto", "on", "off"] = Field(
        "auto",
        description="sglang: receives weights beside generation, in host memory; auto = where it runs on a CPU, shares "
        "its GPU, or takes adapters alone",
    )
    start_timeout_s: float = Field(
        0.0,
        ge=0,
        description="how long an engine may take until its first answer; 0 = 300 s, on GPUs, where the first start "
        "compiles kernels, 1,800 s",
    )
    request_timeout_s: float = Field(300.0, gt=0, description="longest wait for one turn")
    max_restarts: int = Field(3, ge=0, description="restarts of an engine that has ended, at most, within an hour")

    @field_validator("kind")
    @classmethod
    def _kind_exists(cls, kind: str) -> str:
        capabilities_of(kind)
        return kind

    @model_validator(mode="after")
    def _a_router_has_engines(self) -> Self:
        if self.router and not self.urls:
            raise ValueError(f"engine.router = {self.router!r}: name the engines behind it in engine.urls")
        return self

    @property
    def start_limit_s(self) -> float:
        """Return how long an engine may take until its first answer."""
        return self.start_timeout_s or (1800.0 if self.device == "cuda" else 300.0)

    @property
    def elsewhere(self) -> bool:
        """True if this recipe starts no engines: they run already, or on other hosts."""
        return bool(self.urls) or not self.count

    @property
    def learner_fraction(self) -> float:
        """Fraction of its GPU's memory that the learner may use."""
        return 1.0 - self.mem_fraction if self.shares_gpu else 1.0

    def unshareable(self, device: str, num_ranks: int) -> str:
        """Return why the engine cannot share the GPU of a learner on `device` ("cpu" or "cuda"); empty if it can, or if
        the recipe does not ask for it."""
        if self.shares_gpu and device != "cuda":
            return "engine.shares_gpu with learner.device = 'cpu': there is no GPU to share; leave it out"
        if self.shares_gpu and num_ranks > 1:
            return (
                f"engine.shares_gpu with {num_ranks} ranks: an engine shares the GPU of a learner of one rank; start "
                "one, or leave it out"
            )
        return ""

    @model_validator(mode="after")
    def _one_engine_shares_a_gpu(self) -> Self:
        wanted = {"device": "cuda", "count": 1, "tensor_parallel": 1, "urls": ()}
        wrong = [name for name, value in wanted.items() if getattr(self, name) != value] if self.shares_gpu else []
        if wrong:
            raise ValueError(
                f"engine.shares_gpu with engine.{wrong[0]} = {getattr(self, wrong[0])!r}: the learner shares its GPU "
                f"with one engine that is started for it; set it to {wanted[wrong[0]]!r}"
            )
        if self.shares_gpu and not self.mem_fraction:
            raise ValueError(
                "engine.shares_gpu without engine.mem_fraction: say which share of the GPU the engine has, 0.4 for "
                "example; the learner may use the rest"
            )
        return self


NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class HeldOutConfig(Section):
    """One of several held-out sets."""

    name: str = Field(..., pattern=NAME, description="its name in metrics: letters, digits, - _ and .")
    task: str = Field("", description="name of the task whose samples it has; empty = the only one")
    samples: int = Field(0, ge=0, description="its samples; 0 = eval.samples")
    source: str = Field("", description="dataset; empty = data.eval_source, or held-out seeds")
    env_config: dict[str, Any] = Field(
        default_factory=dict, description="env_config of held-out seeds, as in data.variants"
    )


class EvalConfig(Section):
    every_steps: int = Field(
        0, ge=0, description="a multiple of learner.publish.every; 0 = only before and after training"
    )
    samples: int = Field(0, ge=0, description="held-out samples; 0 = no evaluation")
    sets: tuple[HeldOutConfig, ...] = Field(
        (), max_length=32, description="several held-out sets, instead of one for each task"
    )
    before: bool = Field(True, description="the policy is evaluated before training, too")
    greedy: bool = Field(False, description="also evaluate greedily before and after")
    repeats: int = Field(
        1, gt=0, description="episodes of each held-out sample: gives mean and pass@k; greedy plays one"
    )
    best: str = Field("success", description="metric by which the best evaluated checkpoint is kept; empty = none is")


class RecordConfig(Section):
    """Which episodes of a run are recorded, to be looked at later; see shared/recordings."""

    every: int = Field(
        10, ge=0, description="steps between those that are recorded, beside failures and evaluations; 0 = nothing is"
    )
    groups: int = Field(8, ge=0, description="groups of a recorded step that are written down")
    max_gb: float = Field(2.0, gt=0, description="GB of disk that recordings may take; the oldest go first")


class TraceConfig(Section):
    steps: tuple[PositiveInt, PositiveInt] | tuple[()] = Field(
        (), description="[first, last] step of which a trace is written into the run's folder; empty = none"
    )

    @field_validator("steps")
    @classmethod
    def _are_in_order(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if steps and steps[0] > steps[1]:
            raise ValueError(f"trace.steps = {list(steps)}: write [first, last], such as {list(steps[::-1])}")
        return steps


class TransportConfig(Section):
    max_message_bytes: int = Field(256 * 2**20, gt=0, description="larger messages are refused")
    keys: str = Field("", description="folder of keys, made by python -m shared.keys; needed off loopback")
    key_name: str = Field("actor", description="name of the actor key in that folder that this host uses")
    allow_plain: bool = Field(False, description="off loopback without keys: only where everybody is trusted")


class GuardConfig(Section):
    """Bounds that slow or stop a run whose policy falls apart."""

    max_kl: float = Field(
        0.1,
        ge=0,
        description=(
            "KL per token by which one step may move the policy; beyond it the step's later "
            "updates are skipped and the learning rate is reduced; 0 = no bound"
        ),
    )
    entropy_min: float = Field(
        0.0, ge=0, description="nats a token below which the policy counts as collapsed; 0 = none"
    )
    entropy_max: float | None = Field(
        None,
        gt=0,
        description="nats a token above which it counts as fallen apart; null = twice the first step's, plus 1",
    )
    on_entropy: Literal["stop", "rewind"] = Field(
        "stop", description="end the run, or go back to the last good checkpoint with half the learning rate, 3 times"
    )


class MetricsConfig(Section):
    writers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"], ...] = Field(
        ("tensorboard",),
        description="who shows the metrics, besides metrics.jsonl; all but the first are to be installed",
    )
    project: str = Field(
        "pronk", min_length=1, description="the project that the run stands in; mlflow: the experiment"
    )


class AlarmsConfig(Section):
    webhook: str = Field("", description="URL that each alarm is posted to as JSON; empty = none")

    @field_validator("webhook")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        if value and not re.fullmatch(r"https?://[^/\s?#]+\S*", value):
            raise ValueError(
                "alarms.webhook is no URL (it is not shown, as it may hold a secret): write https://host/..."
            )
        return value

    @field_serializer("webhook", when_used="json")
    def _without_its_secret(self, value: str) -> str:
        """Return only scheme and host of the URL: the rest may hold a secret, and this form goes into the run's folder,
        into checkpoints and to actors."""
        parts = urlsplit(value)
        return f"{parts.scheme}://{parts.hostname}" if value else ""
