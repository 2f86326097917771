"""The split of a task's GPUs between learner and engines: of all splits the one with the shortest step, by the plan's
memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from operator import attrgetter
from typing import Any

from learner.plan.duration import FLOAT32_TAKES, LEAST_EPISODES, Engines, generation_time, publication_time
from learner.plan.fit import setting_of
from learner.plan.machines import Machine
from learner.plan.memory_use import DTYPE_BYTES, FP32, Setting, host_memory, usable_bytes
from learner.plan.mesh_choice import Choice, choices
from shared.config.recipe import ConfigError, Recipe
from shared.families.model_sizes import ModelSizes
from shared.families.registry import HUB_NAMES, PUBLISHED, find_sizes

MESH = ("shard_size", "context", "expert", "microbatch_tokens", "activation_checkpointing", "offload")
MEM_FRACTION = 0.8  # share of an engine's GPU; the rest is for the vision tower, graphs and arriving weights
MOST_BATCH = 256
# Engines with more GPUs each must need at most this share of the seconds: their sums cost more than is known.
GAIN = 0.8
RANK = 32  # rank of the adapters that a refusal proposes
SHARES = tuple(i / 20 for i in range(3, 17))  # shares of one GPU that an engine can have
# FEW: an engine with fewer episodes gets a note. MUCH: a note proposes at most so many times the GPUs.
FEW, MUCH = 4, 4
MOST_HOSTS = 32
MOST_SPLITS = 8  # number of splits that are compared


class DoesNotFit(ConfigError):
    """No split of these GPUs has room for the model."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The task to plan. `given`: dotted fields of the recipe that the user has set; the plan does not change them."""

    recipe: Recipe
    sizes: ModelSizes
    machine: Machine
    given: frozenset[str] = frozenset()
    episode_tokens: int = 0  # tokens of a mean episode; 0: half of model.max_context

    def fixed(self, field: str) -> Any:
        """Return the user's value of a field; None if the plan may choose it."""
        return attrgetter(field)(self.recipe) if field in self.given else None

    @property
    def sampled_tokens(self) -> int:
        """The number of sampled tokens in a mean episode, assumed to be half of it, as in the plan of the learner's
        memory."""
        return max(1, min(self.recipe.most_tokens, self.mean_tokens // 2))

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.recipe.model.dtype]

    @property
    def mean_tokens(self) -> int:
        return self.episode_tokens or self.recipe.model.max_context // 2

    def playing(self, hosts: int) -> int:
        """Return the number of episodes in play at once, over all hosts' actors."""
        learner, actor = self.recipe.learner, self.recipe.actor
        reach = (learner.max_staleness + 1) * learner.publish.every * learner.groups_per_step
        return min(hosts * actor.processes * actor.groups, reach) * learner.group_size


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A job's layout on its GPUs, and the seconds of its parts, none of them measured."""

    gpus: int
    choice: Choice  # the learner's mesh
    engines: Engines
    batch: int  # episodes that one engine advances at once
    generating: float  # seconds of generating a step's episodes
    publishing: float  # seconds of publications per step
    evaluating: float  # seconds of all evaluations of the run
    copies_checkpoint: bool  # the host has room for the copy of a checkpoint that is written in the background
    shared: bool = False  # the engine is on the GPU of the learner's only rank
    notes: tuple[str, ...] = field(default=())

    @property
    def ranks(self) -> int:
        return self.choice.setting.gpus

    @property
    def learning(self) -> float:
        """The seconds of the learner's part of a step."""
        return self.choice.seconds

    @property
    def seconds(self) -> float:
        """The seconds of a step. Learner and engines work at the same time, or one after the other on a shared GPU;
        both wait for a publication."""
        working = self.learning + self.generating if self.shared else max(self.learning, self.generating)
        return working + self.publishing

    def hours(self, steps: int) -> float:
        """Return the hours of `steps` steps and all evaluations."""
        return (steps * self.seconds + self.evaluating) / 3600

    def fields(self, gpus_per_node: int) -> dict[str, Any]:
        """Return dotted fields of the recipe -> the values that the plan chooses. `engine.count` is per host."""
        setting, engines = self.choice.setting, self.engines
        of_host = 1 if self.shared else min(self.gpus - self.ranks, gpus_per_node) // engines.tensor_parallel
        return {f"learner.parallel.{name}": getattr(setting, name) for name in MESH} | {
            "engine.count": of_host,
            "engine.shares_gpu": self.shared,
            "engine.tensor_parallel": engines.tensor_parallel,
            "engine.mem_fraction": engines.mem_fraction,
            "engine.max_batch": engines.max_batch,
            "learner.checkpoint.in_background": self.copies_checkpoint,
        }


def plan(job: Workload, gpus: int) -> RunPlan:
    """Return the fastest plan. Raise DoesNotFit, which names the next number of GPUs with enough room, or the next
    smaller model."""
    context, longest = job.recipe.model.max_context, job.sizes.max_context
    if context > longest:
        raise ConfigError(f"model.max_context = {context} is longer than the model's, {longest} tokens; lower it")
    if gpus < 1:
        raise ConfigError(f"--gpus {gpus}: at least 1")
    if gpus > job.machine.gpus_per_node and gpus % job.machine.gpus_per_node:
        raise ConfigError(f"--gpus {gpus}: several hosts have a multiple of {job.machine.gpus_per_node} together")
    fastest = best(job, gpus)
    if fastest is None:
        raise DoesNotFit(_refusal(job, gpus))
    return replace(fastest, notes=tuple(_notes(job, fastest)))


def _notes(job: Workload, chosen: RunPlan) -> Iterator[str]:
    """Yield notes for the user besides the numbers."""
    if chosen.choice.setting.offload and "learner.parallel.offload" not in job.given:
        few = (n for n in _more(chosen.gpus, job.machine) if n <= MUCH * chosen.gpus)
        more = next((n for n in few if fits(job, n, offload=False)), 0)
        yield "the learner's state rests in its host's memory and travels for every microbatch" + (
            f"; {more} GPUs have room for it" if more else ""
        )
    if job.dtype_bytes == FP32:
        yield f"seconds are those of bfloat16: {FLOAT32_TAKES}"
    if chosen.batch < FEW and chosen.generating > chosen.learning:
        yield (
            f"an engine has {chosen.batch} episodes at once, too few to be busy: give the task fewer GPUs, or raise "
            "learner.groups_per_step"
        )


def best(job: Workload, gpus: int, *, offload: bool | None = None) -> RunPlan | None:
    """Return the fastest plan; None if nothing fits. `offload`: only plans with this value; None: offloaded plans only
    if no other fits."""
    for offloaded in _offloads(job, offload):
        if plans := list(_plans(job, gpus, offloaded)):
            return min(plans, key=lambda made: (round(made.seconds, 1), made.choice.bytes_of_rank))
    return None


def fits(job: Workload, gpus: int, *, offload: bool | None = None) -> bool:
    """Tell whether any plan fits; faster than `best`."""
    return any(True for offloaded in _offloads(job, offload) for _ in _plans(job, gpus, offloaded))


def fewest(job: Workload) -> int:
    """Return the smallest number of GPUs with enough room; 0 if no number has."""
    return next((n for n in (1, *_more(1, job.machine)) if fits(job, n)), 0)


def _offloads(job: Workload, wanted: bool | None) -> tuple[bool, ...]:
    given = job.fixed("learner.parallel.offload")
    wanted = wanted if given is None else given
    return (False, True) if wanted is None else (wanted,)


def _plans(job: Workload, gpus: int, offload: bool) -> Iterator[RunPlan]:
    """Yield the plans that fit, starting with the most learner ranks; for one GPU, starting with the engine's smallest
    share."""
    if gpus == 1:
        yield from _shared(job, offload)
    for ranks in reversed([*_splits(gpus, job.machine.gpus_per_node)]):
        engines = list(_engines(job, gpus - ranks, gpus > job.machine.gpus_per_node))
        choice = _mesh(job, ranks, offload) if engines else None
        if choice is not None:
            made, *larger = (_plan(job, gpus, choice, each) for each in engines)
            for each in larger:
                made = each if each.generating < GAIN * made.generating else made
            yield made


def _shared(job: Workload, offload: bool) -> Iterator[RunPlan]:
    """Yield the plans in which the learner and an engine share one GPU."""
    machine, fixed = job.machine, job.fixed("engine.mem_fraction")
    for share in [fixed] if fixed else SHARES:
        rest = replace(machine, gpu_bytes=machine.gpu_bytes * (1 - share), host_bytes=machine.host_of(1))
        engine = Engines.sharing(machine.gpu_bytes, share, MOST_BATCH, job.dtype_bytes)
        fits = engine.cache_tokens(job.sizes) >= LEAST_EPISODES * job.recipe.model.max_context
        choice = _mesh(replace(job, machine=rest), 1, offload) if fits else None
        if choice is not None:
            yield replace(_plan(job, 1, choice, _with_batch(job, engine)), shared=True)


def _splits(gpus: int, node: int) -> Iterator[int]:
    """Yield numbers of learner ranks: one or even numbers; with several hosts, whole hosts."""
    if gpus <= node:
        yield from (ranks for ranks in range(1, gpus) if ranks == 1 or ranks % 2 == 0)
    else:
        hosts = gpus // node
        step = ceil((hosts - 1) / MOST_SPLITS)
        yield from (own * node for own in range(step, hosts, step))


def _mesh(job: Workload, ranks: int, offload: bool) -> Choice | None:
    """Return the fastest mesh of the learner that fits its GPUs and its host."""
    machine, sizes = job.machine, job.sizes
    setting = replace(
        setting_of(job.recipe, ranks, machine.gpu_bytes),
        gpus_per_node=machine.gpus_per_node,
        episode_tokens=job.mean_tokens,
        offload=offload,
        context=1,
        expert=1,
        shard_size=0,
    )
    fixed = {name: job.fixed(f"learner.parallel.{name}") for name in MESH}
    fixed = {name: value for name, value in fixed.items() if value is not None}
    room = usable_bytes(machine.gpu_bytes)
    fitting = choices(sizes, setting, job.recipe.model.max_context, room, machine.speed, fixed)
    return next((each for each in fitting if host_bytes(sizes, each.setting, False) <= machine.host_bytes), None)


def _plan(job: Workload, gpus: int, choice: Choice, engines: Engines) -> RunPlan:
    machine, learner, sizes, evaluation = job.machine, job.recipe.learner, job.sizes, job.recipe.eval
    setting = choice.setting
    playing = job.playing(max(1, ceil((gpus - setting.gpus) / machine.gpus_per_node)))
    speed = replace(machine.speed, wire=machine.speed.host) if gpus == 1 else machine.speed
    generating = generation_time(sizes, setting, engines, playing, job.sampled_tokens, machine.speed)
    times = 2 + (learner.total_steps // evaluation.every_steps if evaluation.every_steps else 0)
    episodes = times * evaluation.samples * evaluation.repeats
    return RunPlan(
        gpus=gpus,
        choice=choice,
        engines=engines,
        batch=engines.batch(sizes, setting.episode_tokens, playing),
        generating=generating,
        publishing=publication_time(sizes, setting, speed).seconds / learner.publish.every,
        evaluating=episodes / setting.episodes * generating,
        copies_checkpoint=setting.copies_checkpoint and host_bytes(sizes, setting, True) <= machine.host_of(gpus),
    )


def host_bytes(sizes: ModelSizes, setting: Setting, copies_checkpoint: bool) -> float:
    """Return the bytes of one host, with or without the copy of a checkpoint that is written in the background. Without
    it, training waits for the writing."""
    return host_memory(sizes, replace(setting, copies_checkpoint=copies_checkpoint)).total


def _engines(job: Workload, gpus: int, whole_hosts: bool) -> Iterator[Engines]:
    """Yield engines that have enough room and use all of the GPUs, those with few GPUs each first."""
    node, sizes, episode = job.machine.gpus_per_node, job.sizes, job.recipe.model.max_context
    tensor_parallel, count = job.fixed("engine.tensor_parallel"), job.fixed("engine.count")
    for each in [tensor_parallel] if tensor_parallel else [1, 2, 4, 8]:
        if gpus % each or each > node or sizes.num_heads % each or (whole_hosts and node % each):
            continue
        if count and count * each != (node if whole_hosts else gpus):  # a recipe's count is per host
            continue
        fraction = job.fixed("engine.mem_fraction") or MEM_FRACTION
        made = Engines(gpus // each, each, job.machine.gpu_bytes, fraction, MOST_BATCH, job.dtype_bytes)
        if made.cache_tokens(sizes) >= LEAST_EPISODES * episode:
            yield _with_batch(job, made)


def _with_batch(job: Workload, engines: Engines) -> Engines:
    """Return the engines with the number of concurrent requests for which there is room if all are mean episodes."""
    fitting = engines.cache_tokens(job.sizes) // job.mean_tokens
    chosen = min(MOST_BATCH, fitting // 8 * 8 if fitting > 8 else fitting)
    return replace(engines, max_batch=job.fixed("engine.max_batch") or chosen)


def _more(gpus: int, machine: Machine) -> Iterator[int]:
    """Yield larger numbers of GPUs to try: even ones on one host, then 2, 3, 4, 6, 8, 12, ... hosts."""
    node, hosts = machine.gpus_per_node, [2**i // 2 * j for i in range(1, MOST_HOSTS.bit_length()) for j in (2, 3)]
    yield from (n for n in [*range(2, node + 1, 2), *(each * node for each in hosts)] if n > gpus)


def _refusal(job: Workload, gpus: int) -> str:
    """Return the reason why nothing fits, and what would: adapters, more GPUs, or a smaller model."""
    name = job.recipe.model.path.rstrip("/").rpartition("/")[2]
    words = f"{name} does not fit {gpus} GPU{'s' * (gpus > 1)} ({job.machine}), the learner's and the engines' together"
    cures = []
    if fits(_with_adapters(job), gpus):
        cures.append(f"with --learner.lora.rank {RANK} it does")
    if enough := next((n for n in _more(gpus, job.machine) if fits(job, n)), 0):
        cures.append(f"{enough} such GPUs are enough")
    smaller = (model for model in _smaller(name, job.sizes) if fits(replace(job, sizes=find_sizes(model)), gpus))
    if model := next(smaller, ""):
        cures.append(f"{model} fits {gpus}")
    return f"{words}: {', or '.join(cures) or 'use larger GPUs'}"


def _with_adapters(job: Workload) -> Workload:
    """Return the same job with adapters trained instead of the weights."""
    lora = job.recipe.learner.lora
    if lora.on:
        return job
    learner = job.recipe.learner.model_copy(update={"lora": lora.model_copy(update={"rank": RANK})})
    return replace(job, recipe=job.recipe.model_copy(update={"learner": learner}))


def _smaller(name: str, sizes: ModelSizes) -> list[str]:
    """Return published models of the same family and variant with fewer parameters, the largest first."""
    family = name.partition("-VL")[0]
    variant = "Thinking" if name.endswith("Thinking") else "Instruct"
    fewer = [base for base, of_base in PUBLISHED.items() if of_base.parameters < sizes.parameters]
    fewer = [base for base in fewer if base.startswith(family) and f"{base}-{variant}" in HUB_NAMES]
    return [f"{base}-{variant}" for base in sorted(fewer, key=lambda base: -PUBLISHED[base].parameters)]
