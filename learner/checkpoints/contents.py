"""What a run learns from, told by its content: digests of the model's files, of the samples and of the user's code,
kept in each checkpoint, so that a resumed run notices other content under the same names.

A weight file is not read as a whole: of each tensor its name, dtype, shape and a few blocks count. So another model is
noticed, and a change of single values of a large tensor may not be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import Any

import xxhash

from learner.model.weight_files import weight_files
from learner.tickets.sources import ListSource, MixedSource, SampleSource
from shared.agreement import command_digest, function_digest, model_digest, source_digest
from shared.config.recipe import Recipe
from shared.config.tasks import tasks_of
from shared.log import get_logger
from shared.types import Sample

BLOCK = 16 << 10  # bytes
BLOCKS = 8  # read of a larger tensor
CODE = ("env.module", "env.reward", "rollout.path", "rollout.agent", "rollout.command")
"""Fields whose content a person may change within a run: a difference is only logged."""


def contents_of(recipe: Recipe, source: SampleSource | None = None, held_out: Sequence[Sample] = ()) -> dict[str, str]:
    """Return what the recipe's fields stand for, by field: a digest in words, "" if it is not known. Samples of seeds
    are known by the recipe. Fields of one of several tasks begin with its name."""
    model = Path(recipe.model.path)
    contents = {
        "model.path": weights_digest(model),
        "model.path (tokenizer, chat template, image processor)": model_digest(str(model)).digest,
        "rollout.path": function_digest(recipe.rollout.path).digest,
        "rollout.agent": function_digest(recipe.rollout.agent).digest,
        "rollout.command": command_digest(recipe.rollout.command).digest,
    }
    if teacher := recipe.learner.objective.teacher_folder:
        contents["learner.objective.teacher"] = weights_digest(Path(teacher))
    sources = {task.name: task.source for task in source.tasks} if isinstance(source, MixedSource) else {"": source}
    for task in tasks_of(recipe):
        own = [sample for sample in held_out if sample.task == sample.held_out == task.name]
        found = contents_of_task(task.recipe, sources.get(task.name), own)
        contents |= {f"task {task.name}: {name}" if task.name else name: value for name, value in found.items()}
    for each in recipe.eval.sets:
        if each.source:
            own = [sample for sample in held_out if sample.held_out == each.name]
            contents[f"eval.sets: {each.name} ({len(own)} samples)"] = samples_digest(own)
    return contents


def contents_of_task(recipe: Recipe, source: SampleSource | None, held_out: Sequence[Sample]) -> dict[str, str]:
    """Return what a recipe's fields about its task stand for."""
    contents = {
        "env.module": source_digest(recipe.env.module).digest,
        "env.reward": function_digest(recipe.env.reward).digest,
    }
    if recipe.data.source != "seeds":
        contents["data.source"] = samples_digest(source.samples) if isinstance(source, ListSource) else ""
        if held_out:  # of another number, others are evaluated, as the recipe says
            contents[f"data.eval_source (eval.samples = {recipe.eval.samples})"] = samples_digest(held_out)
    return contents


def check_contents(path: Path, recorded: Mapping[str, str] | None, contents: Mapping[str, str]) -> None:
    """Raise ValueError that names the fields whose content is not that of the checkpoint at `path`; log other code.
    `recorded`: the checkpoint's; None if it has none, which is logged."""
    if not contents:
        return
    log = get_logger("learner")
    if recorded is None:
        log.warning("%s does not tell the content of its model and data: it is not compared", path)
        return
    wrong = {
        name: (recorded[name], now)
        for name, now in contents.items()
        if now and recorded.get(name) and recorded[name] != now
    }
    for name in [name for name in wrong if name.rpartition(": ")[2] in CODE]:
        log.warning("resuming with other code under the same name: %s (then: %s, now: %s)", name, *wrong.pop(name))
    if wrong:
        listing = ", ".join(f"{name} (then: {was}, now: {now})" for name, (was, now) in wrong.items())
        raise ValueError(
            f"checkpoint {path} is of other content: {listing}; put the files back, or start anew with "
            "learner.resume = 'never'"
        )


def weights_digest(folder: Path) -> str:
    """Return the number of a model's tensors and a digest of them, the same however they are split into files; "" if
    they cannot be read."""
    try:
        tensors = [tensor for path in weight_files(folder) for tensor in _tensors(path)]
        # Several reads at once: on a network's file system each takes a millisecond.
        with ThreadPoolExecutor(8) as threads:
            lines = sorted(threads.map(_line, tensors))
    except (OSError, ValueError, ArithmeticError, KeyError, TypeError, AttributeError):
        return ""  # the error shows when the weights are loaded
    return f"{len(lines)} tensors, {_short(lines)}"


def samples_digest(samples: Sequence[Sample]) -> str:
    """Return the number of samples and a digest of them in their order. The system prompt does not count: it belongs to
    the environment."""
    return f"{len(samples)} samples, {_short(map(_sample_line, samples))}"


def _sample_line(sample: Sample) -> str:
    prompt = [message for message in sample.prompt if message.get("role") != "system"]
    images = [image.content_hash for image in sample.images]
    return json.dumps([sample.id, prompt, images, sample.label, sample.metadata], sort_keys=True, default=str)


def _tensors(path: Path) -> Iterator[tuple[Path, str, dict[str, Any], int]]:
    """Yield (file, name, header, start of the data in the file) of each tensor of a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, 100 << 20)))
    yield from ((path, name, entry, 8 + size) for name, entry in header.items() if name != "__metadata__")


def _line(tensor: tuple[Path, str, dict[str, Any], int]) -> str:
    path, name, entry, start = tensor
    first, last = entry["data_offsets"]
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        for offset, size in _blocks(last - first):
            _update(digest, file, start + first + offset, size)
    return f"{name} {entry['dtype']} {entry['shape']} {digest.hexdigest()}"


def _blocks(size: int) -> list[tuple[int, int]]:
    """Return (offset, size) of the blocks that are read of a tensor of `size` bytes: all of it, or some spread over
    it."""
    if size <= BLOCK * BLOCKS:
        return [(0, size)]
    return [((size - BLOCK) * i // (BLOCKS - 1), BLOCK) for i in range(BLOCKS)]


def _update(digest: xxhash.xxh3_128, file: RawIOBase, offset: int, size: int) -> None:
    file.seek(offset)
    while size > 0:
        data = file.read(size)
        if not data:
            raise ValueError("the file is cut off")
        digest.update(data)
        size -= len(data)


def _short(lines: Iterator[str] | Sequence[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="replace") + b"\n")
    return digest.hexdigest()[:16]
