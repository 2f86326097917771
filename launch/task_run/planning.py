"""Which GPUs learn and which generate, and how: of all splits of a task's GPUs the one whose step is the shortest, by
the plan's own memory and time (learner/parallel/choice.py, learner/model/duration.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from typing import Any

from launch.task_run.machines import Machine
from launch.task_run.tasks import MODELS, value_of
from learner.model.duration import FLOAT32_TAKES, LEAST_EPISODES, Engines, generation_time, publication_time
from learner.model.memory import DTYPE_BYTES, FP32, Setting, host_memory
from learner.model.sizes import PUBLISHED, ModelSizes
from learner.parallel.choice import Choice, choices
from learner.plan import RESERVED_FRACTION, setting_of
from shared.config import ConfigError, Recipe

MESH = ("shard_size", "context", "expert", "microbatch_tokens", "activation_checkpointing", "offload")
MEM_FRACTION = 0.8  # of an engine's GPU; the rest is for the vision tower, graphs and weights that arrive
MOST_BATCH = 256
GAIN = 0.8  # of the seconds, at most, that engines of more GPUs each have to need: their sums cost more than is known
RANK = 32  # of adapters that a refusal proposes
SHARES = tuple(i / 20 for i in range(3, 17))  # of one GPU, that an engine could have
FEW, MUCH = 4, 4  # episodes of an engine; times as many GPUs that a note still proposes
MOST_HOSTS = 32
MOST_SPLITS = 8  # that are compared


class DoesNotFit(ConfigError):
    """No split of these GPUs has room for the model."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be planned. `given`: dotted fields that the user has set, which stay as they are."""

    recipe: Recipe
    sizes: ModelSizes
    machine: Machine
    given: frozenset[str] = frozenset()
    episode_tokens: int = 0  # of a mean episode; 0: half of model.max_context

    def fixed(self, field: str) -> Any:
        """The user's value; None where it is to be chosen."""
        return value_of(self.recipe, field) if field in self.given else None

    @property
    def sampled_tokens(self) -> int:
        """Of a mean episode, assumed: half of it, as in the plan of the learner's memory."""
        return max(1, min(self.recipe.env.max_tokens, self.mean_tokens // 2))

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.recipe.model.dtype]

    @property
    def mean_tokens(self) -> int:
        return self.episode_tokens or self.recipe.model.max_context // 2

    def playing(self, hosts: int) -> int:
        """Episodes in play at once, all hosts' actors together."""
        learner, actor = self.recipe.learner, self.recipe.actor
        reach = (learner.max_staleness + 1) * learner.publish.every * learner.groups_per_step
        return min(hosts * actor.processes * actor.groups, reach) * learner.group_size


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job lies on its GPUs, and the seconds of its parts, none of them measured."""

    gpus: int
    choice: Choice  # the learner's mesh
    engines: Engines
    batch: int  # episodes of one engine that advance at once
    generating: float  # seconds of a step's episodes
    publishing: float  # of one publication, in the mean over steps
    evaluating: float  # of all evaluations of the run
    copies_checkpoint: bool  # whether a host has room for a copy that is written in the background
    shared: bool = False  # the engine is on the GPU of the learner's one rank
    notes: tuple[str, ...] = field(default=())

    @property
    def ranks(self) -> int:
        return self.choice.setting.gpus

    @property
    def learning(self) -> float:
        return self.choice.seconds

    @property
    def seconds(self) -> float:
        """Of a step: the learner and the engines work at the same time, or share a GPU, and both wait for a
        publication."""
        working = self.learning + self.generating if self.shared else max(self.learning, self.generating)
        return working + self.publishing

    def hours(self, steps: int) -> float:
        return (steps * self.seconds + self.evaluating) / 3600


def plan(job: Job, gpus: int) -> Plan:
    """The fastest. DoesNotFit names the next number of GPUs that has room, or the next smaller model."""
    context, longest = job.recipe.model.max_context, job.sizes.max_context
    if context > longest:
        raise ConfigError(f"model.max_context = {context} is longer than the model's, {longest} tokens; lower it")
    if gpus < 1:
        raise ConfigError(f"--gpus {gpus}: at least 1")
    if gpus > job.machine.gpus_per_node and gpus % job.machine.gpus_per_node:
        raise ConfigError(f"--gpus {gpus}: several hosts have a multiple of {job.machine.gpus_per_node} together")
    found = best(job, gpus)
    if found is None:
        raise DoesNotFit(_refusal(job, gpus))
    return replace(found, notes=tuple(_notes(job, found)))


def _notes(job: Job, found: Plan) -> Iterator[str]:
    """What the user should know beside the numbers."""
    if found.choice.setting.offload and "learner.parallel.offload" not in job.given:
        few = (n for n in _more(found.gpus, job.machine) if n <= MUCH * found.gpus)
        more = next((n for n in few if fits(job, n, offload=False)), 0)
        yield "the learner's state rests in its host's memory and travels for every microbatch" + (
            f"; {more} GPUs have room for it" if more else ""
        )
    if job.dtype_bytes == FP32:
        yield f"seconds are those of bfloat16: {FLOAT32_TAKES}"
    if found.batch < FEW and found.generating > found.learning:
        yield (
            f"an engine has {found.batch} episodes at once, too few to be busy: give the task fewer GPUs, or raise "
            "learner.groups_per_step"
        )


def best(job: Job, gpus: int, *, offload: bool | None = None) -> Plan | None:
    """None where nothing fits. `offload`: only such plans; else offloaded ones where no other fits."""
    for offloaded in _offloads(job, offload):
        if found := list(_plans(job, gpus, offloaded)):
            return min(found, key=lambda made: (round(made.seconds, 1), made.choice.bytes_of_rank))
    return None


def fits(job: Job, gpus: int, *, offload: bool | None = None) -> bool:
    """Whether there is any plan; faster than `best`."""
    return any(True for offloaded in _offloads(job, offload) for _ in _plans(job, gpus, offloaded))


def fewest(job: Job) -> int:
    """GPUs with room for it; 0 where no number has."""
    return next((n for n in (1, *_more(1, job.machine)) if fits(job, n)), 0)


def _offloads(job: Job, wanted: bool | None) -> tuple[bool, ...]:
    given = job.fixed("learner.parallel.offload")
    wanted = wanted if given is None else given
    return (False, True) if wanted is None else (wanted,)


def _plans(job: Job, gpus: int, offload: bool) -> Iterator[Plan]:
    """Those that fit, from the most ranks on; of one GPU, from the smallest share of it on."""
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


def _shared(job: Job, offload: bool) -> Iterator[Plan]:
    """One GPU for the learner and an engine."""
    machine, fixed = job.machine, job.fixed("engine.mem_fraction")
    for share in [fixed] if fixed else SHARES:
        rest = replace(machine, gpu_bytes=machine.gpu_bytes * (1 - share), host_bytes=machine.host_of(1))
        engine = Engines.sharing(machine.gpu_bytes, share, MOST_BATCH, job.dtype_bytes)
        fits = engine.cache_tokens(job.sizes) >= LEAST_EPISODES * job.recipe.model.max_context
        choice = _mesh(replace(job, machine=rest), 1, offload) if fits else None
        if choice is not None:
            yield replace(_plan(job, 1, choice, _with_batch(job, engine)), shared=True)


def _splits(gpus: int, node: int) -> Iterator[int]:
    """Numbers of learner ranks: one, or even; of several hosts whole ones."""
    if gpus <= node:
        yield from (ranks for ranks in range(1, gpus) if ranks == 1 or ranks % 2 == 0)
    else:
        hosts = gpus // node
        step = ceil((hosts - 1) / MOST_SPLITS)
        yield from (own * node for own in range(step, hosts, step))


def _mesh(job: Job, ranks: int, offload: bool) -> Choice | None:
    """The learner's fastest mesh that fits its GPUs and its host."""
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
    room = machine.gpu_bytes * (1 - RESERVED_FRACTION)
    found = choices(sizes, setting, job.recipe.model.max_context, room, machine.speed, fixed)
    return next((each for each in found if host_bytes(sizes, each.setting, False) <= machine.host_bytes), None)


def _plan(job: Job, gpus: int, choice: Choice, engines: Engines) -> Plan:
    machine, learner, sizes, evaluation = job.machine, job.recipe.learner, job.sizes, job.recipe.eval
    setting, playing = choice.setting, job.playing(max(1, ceil((gpus - choice.setting.gpus) / machine.gpus_per_node)))
    speed = replace(machine.speed, wire=machine.speed.host) if gpus == 1 else machine.speed
    generating = generation_time(sizes, setting, engines, playing, job.sampled_tokens, machine.speed)
    times = 2 + (learner.total_steps // evaluation.every_steps if evaluation.every_steps else 0)
    episodes = times * evaluation.samples * evaluation.repeats
    return Plan(
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
    """Of one host; without the copy that is written in the background, which training can wait for instead."""
    return host_memory(sizes, replace(setting, copies_checkpoint=copies_checkpoint)).total


def _engines(job: Job, gpus: int, whole_hosts: bool) -> Iterator[Engines]:
    """Engines that have room and leave no GPU over, of few GPUs each first."""
    node, sizes, episode = job.machine.gpus_per_node, job.sizes, job.recipe.model.max_context
    tensor_parallel, count = job.fixed("engine.tensor_parallel"), job.fixed("engine.count")
    for each in [tensor_parallel] if tensor_parallel else [1, 2, 4, 8]:
        if gpus % each or each > node or sizes.num_heads % each or (whole_hosts and node % each):
            continue
        if count and count * each != (node if whole_hosts else gpus):  # a recipe's count is of one host
            continue
        fraction = job.fixed("engine.mem_fraction") or MEM_FRACTION
        made = Engines(gpus // each, each, job.machine.gpu_bytes, fraction, MOST_BATCH, job.dtype_bytes)
        if made.cache_tokens(sizes) >= LEAST_EPISODES * episode:
            yield _with_batch(job, made)


def _with_batch(job: Job, engines: Engines) -> Engines:
    """With as many requests at once as have room, if they are mean episodes."""
    fitting = engines.cache_tokens(job.sizes) // job.mean_tokens
    chosen = min(MOST_BATCH, fitting // 8 * 8 if fitting > 8 else fitting)
    return replace(engines, max_batch=job.fixed("engine.max_batch") or chosen)


def _more(gpus: int, machine: Machine) -> Iterator[int]:
    """Larger numbers of GPUs that could be had: even ones of one host, then 2, 3, 4, 6, 8, 12, ... hosts."""
    node, hosts = machine.gpus_per_node, [2**i // 2 * j for i in range(1, MOST_HOSTS.bit_length()) for j in (2, 3)]
    yield from (n for n in [*range(2, node + 1, 2), *(each * node for each in hosts)] if n > gpus)


def _refusal(job: Job, gpus: int) -> str:
    name = job.recipe.model.path.rstrip("/").rpartition("/")[2]
    words = f"{name} does not fit {gpus} GPU{'s' * (gpus > 1)} ({job.machine}), the learner's and the engines' together"
    enough = (n for n in _more(gpus, job.machine) if fits(job, n))
    smaller = (each for each in _smaller(name, job.sizes) if fits(replace(job, sizes=PUBLISHED[base_of(each)]), gpus))
    cures = [f"with --learner.lora.rank {RANK} it does" for _ in range(1) if fits(_with_adapters(job), gpus)]
    cures += [f"{n} such GPUs are enough" for n in islice(enough, 1)]
    cures += [f"{each} fits {gpus}" for each in islice(smaller, 1)]
    return f"{words}: {', or '.join(cures) or 'use larger GPUs'}"


def _with_adapters(job: Job) -> Job:
    lora = job.recipe.learner.lora
    if lora.on:
        return job
    learner = job.recipe.learner.model_copy(update={"lora": lora.model_copy(update={"rank": RANK})})
    return replace(job, recipe=job.recipe.model_copy(update={"learner": learner}))


def base_of(model: str) -> str:
    """Without the kind: Instruct, Thinking."""
    return model.rpartition("-")[0]


def _smaller(name: str, sizes: ModelSizes) -> list[str]:
    """Models of the same family and kind with fewer parameters, the largest first."""
    family, kind = name.partition("-VL")[0], "Thinking" if name.endswith("Thinking") else "Instruct"
    fewer = [each for each in MODELS if each.startswith(family) and each.endswith(kind)]
    fewer = [each for each in fewer if PUBLISHED[base_of(each)].parameters < sizes.parameters]
    return sorted(fewer, key=lambda each: -PUBLISHED[base_of(each)].parameters)
