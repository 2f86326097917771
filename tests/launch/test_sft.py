"""Demonstrations become groups, what is none is left out and named; the loss is that of a plain computation."""

from __future__ import annotations

import base64
import io

import pytest
import torch
from PIL import Image as PILImage
from transformers import Qwen2VLImageProcessorPil

from actor.render import Renderer
from envs.chat_rows import chat_of
from envs.row_files import write_rows
from launch.sft import lesson_of, write_demonstrations
from learner.model.policy import load_policy
from learner.offline import endless
from learner.training.trainer import Trainer
from shared.config.recipe import load_recipe
from shared.recordings.group_files import files, read
from tests.support.demonstrated import write
from tests.support.runs import RECIPE
from tests.support.tiny import draw_image, load_model, png, tiny_tokenizer

END = "<|im_end|>"


def uri(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(draw_image(64, 96, seed))).decode()


def chats(count: int) -> list[dict]:
    """Demonstrations of one to three turns, of different lengths, with an image in each."""
    rows = []
    for seed in range(count):
        messages = [{"role": "system", "content": "Solve it."}]
        for turn in range(seed % 3 + 1):
            image = {"type": "image", "image": uri(10 * seed + turn)}
            messages.append({"role": "user", "content": [image, {"type": "text", "text": "Valid last actions: up."}]})
            messages.append({"role": "assistant", "content": f"<answer>{'up, ' * (seed + turn)}left</answer>"})
        rows.append({"messages": messages})
    return rows


@pytest.fixture(scope="module")
def renderer(spec):
    return Renderer(tiny_tokenizer(), spec)


@pytest.fixture
def groups(tmp_path, renderer):
    write_demonstrations(str(write(tmp_path / "six.jsonl", chats(6))), renderer, 4096, tmp_path / "shown")
    return [read(path) for path in files(tmp_path / "shown")]


def plain_loss(folder, row, spec) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model in float64, and -log p of each token of the assistant's, by transformers alone: its chat template,
    image processor and forward."""
    tokenizer, model = tiny_tokenizer(), load_model(folder).double()
    pictures = []
    messages = []
    for message in row["messages"]:
        content = message["content"]
        if not isinstance(content, str):
            for part in content:
                if part["type"] == "image":
                    data = base64.b64decode(part["image"].partition(",")[2])
                    pictures.append(PILImage.open(io.BytesIO(data)).convert("RGB"))
            content = [{"type": "image"} if part["type"] == "image" else part for part in content]
        messages.append({**message, "content": content})
    size = {"shortest_edge": 1024, "longest_edge": 1 << 20}
    found = Qwen2VLImageProcessorPil.from_pretrained(folder, size=size)(images=pictures, return_tensors="pt")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    for grid in found["image_grid_thw"]:
        text = text.replace("<|image_pad|>", "<|pad|>" * int(grid.prod() // 4), 1)
    ids, asked = [], []
    opening = "<|im_start|>assistant\n"
    for number, part in enumerate(text.replace("<|pad|>", "<|image_pad|>").split(opening)):
        answer, end, rest = part.partition(END) if number else ("", "", part)
        for piece, is_asked in ((answer + end, True), (rest, False)):
            new = tokenizer.encode(piece, add_special_tokens=False) if piece else []
            asked += [is_asked] * len(new)
            ids += new
        if number < text.count(opening):
            new = tokenizer.encode(opening, add_special_tokens=False)
            ids += new
            asked += [False] * len(new)
    input_ids = torch.tensor(ids)[None]
    types = (input_ids == spec.image_token_id).int()
    logits = model(
        input_ids=input_ids,
        pixel_values=found["pixel_values"].double(),
        image_grid_thw=found["image_grid_thw"],
        mm_token_type_ids=types,
    ).logits[0]
    logits = logits.index_fill(1, torch.tensor(spec.banned_ids), -torch.inf)  # what no engine may sample
    places = torch.tensor(asked).nonzero()[:, 0]
    return model, -logits.log_softmax(-1)[places - 1, input_ids[0, places]]


def learned(folder, spec, ranks, groups, **learner):
    """The policy's gradient on the groups and the step's metrics; no weight moves."""
    recipe = load_recipe(RECIPE)
    config = lesson_of(recipe, len(groups), 1).learner
    config = config.model_copy(
        update={
            "groups_per_step": len(groups),
            "optimizer": config.optimizer.model_copy(update={"max_grad_norm": 1e9, "lr": 1e-12}),
            "parallel": config.parallel.model_copy(update=learner),
        }
    )
    policy = load_policy(str(folder), spec)
    trainer = Trainer(policy, config, ranks)
    gradients = {}
    step = trainer.optimizer.step

    def noted(*args, **kwargs):
        gradients.update({name: p.grad.clone() for name, p in policy.named_weights() if p.grad is not None})
        return step(*args, **kwargs)

    trainer.optimizer.step = noted
    metrics = trainer.step(groups, version=0)
    return gradients, metrics


def test_loss_and_gradient_are_those_of_transformers_in_float64(folder, spec, ranks, groups):
    """The mean over the assistant's tokens of all rows, as other trainers count it."""
    gradients, metrics = learned(folder, spec, ranks, groups)
    losses, expected = [], None
    for row in chats(6):
        model, terms = plain_loss(folder, row, spec)
        found = dict(zip([n for n, _ in model.named_parameters()], torch.autograd.grad(terms.sum(), list(model.parameters()), allow_unused=True), strict=True))  # fmt: skip # noqa: E501
        expected = found if expected is None else {n: expected[n] + found[n] for n in found if found[n] is not None}
        losses.append(terms.detach())
    count = sum(map(len, losses))
    assert metrics["batch/sampled_tokens"] == count
    assert metrics["loss/policy"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-6)
    assert set(gradients) == set(expected)
    total = torch.cat([g.flatten() for g in expected.values()]).norm() / count
    for name, gradient in gradients.items():
        assert float((gradient - expected[name] / count).norm()) < 2e-6 * float(total), name


def test_packed_and_one_by_one_the_gradient_is_the_same(folder, spec, ranks, groups):
    packed, together = learned(folder, spec, ranks, groups, microbatch_tokens=4096)
    alone, apart = learned(folder, spec, ranks, groups, microbatch_tokens=64)
    assert together["batch/microbatches"] == 1 and apart["batch/microbatches"] == 6
    scale = torch.cat([g.flatten() for g in packed.values()]).norm()
    assert all(float((packed[name] - alone[name]).norm()) < 1e-6 * float(scale) for name in packed)


def test_metrics_that_only_rewards_give_are_not_among_those_of_demonstrations(folder, spec, ranks, groups):
    _, metrics = learned(folder, spec, ranks, groups)
    assert metrics["loss/policy"] > 0 and metrics["policy/entropy"] > 0
    assert not [name for name in metrics if name.startswith(("behaviour/", "policy/advantage", "reference/"))]


# ------------------------------------------------------------------ what is no demonstration


def test_what_is_no_demonstration_is_left_out_counted_and_named_by_file_and_line(tmp_path, renderer):
    ask = {"role": "user", "content": [{"type": "image", "image": "gone.png"}]}
    good = chats(1)[0]
    rows = [
        good,
        {"messages": [{"role": "user", "content": "and nobody answers"}]},
        "",
        "{no JSON",
        {"question": "2 + 2?"},
        {"messages": [ask, {"role": "assistant", "content": "up"}]},
        {"messages": [{"role": "user", "content": "up " * 300}, {"role": "assistant", "content": "up"}]},
        good,
    ]
    data = write(tmp_path / "mixed.jsonl", rows)
    report = write_demonstrations(str(data), renderer, 200, tmp_path / "shown")
    assert (report.rows, report.used, len(files(tmp_path / "shown"))) == (7, 2, 2)
    assert report.left_out == {"unusable": 2, "unreadable": 1, "with an image that cannot be read": 1, "too long": 1}
    line = report.summary()
    for number, why in (
        (2, "no message of the assistant's is to be learned"),
        (4, "is no JSON"),
        (5, "it is no chat"),
        (6, "is no file"),
        (7, "of 200 tokens"),
    ):
        assert any(f"{data}, line {number}: " in each and why in each for each in report.examples), (number, line)
    assert "2 of 7 demonstrations" in line and "\n" not in line


def test_parquet_is_read_too(tmp_path, renderer):
    image = png(draw_image(64, 64))
    rows = [
        {"messages": [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "up"}],
         "images": [{"bytes": image, "path": None}]},
        {"messages": [{"role": "user", "content": "what?"}], "images": []},
    ]  # fmt: skip
    write_rows(tmp_path / "two.parquet", rows)
    report = write_demonstrations(str(tmp_path / "two.parquet"), renderer, 200, tmp_path / "shown")
    (path,) = files(tmp_path / "shown")
    (episode,) = read(path).trajectories
    chat = chat_of(rows[0], tmp_path)
    assert episode.images == (chat.exchanges[0].messages[0]["content"][0]["image"],)
    assert f"{tmp_path / 'two.parquet'}, row 2: no message of the assistant's" in report.summary()


def test_each_epoch_shows_every_demonstration_once_in_an_order_of_its_own(tmp_path, groups):
    paths = files(tmp_path / "shown")
    stream = endless(paths, 0, seed=3)
    epochs = [[next(stream).ticket_id for _ in paths] for _ in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len({*map(tuple, epochs)}) == 4
    flat = [ticket for epoch in epochs for ticket in epoch]
    for start in (1, 6, 8, 17):  # a resumed training goes on in the same order
        later = endless(paths, start, seed=3)
        assert [next(later).ticket_id for _ in flat[start:]] == flat[start:]
    in_order = endless(paths, 4)
    assert [next(in_order).ticket_id for _ in range(4)] == [read(paths[i]).ticket_id for i in (4, 5, 0, 1)]


def test_a_lesson_takes_the_recipes_batches_for_so_many_epochs():
    recipe = load_recipe(RECIPE)  # 16 groups of 4
    lesson = lesson_of(recipe, 100, 3.0)
    assert (lesson.learner.groups_per_step, lesson.learner.group_size, lesson.learner.total_steps) == (64, 1, 5)
    assert lesson.learner.objective.name == "sft" and lesson.learner.optimizer == recipe.learner.optimizer
    own = load_recipe(RECIPE, ["--learner.objective.name", "sft", "--learner.objective.kl_coef", "0.1"])
    assert lesson_of(own, 100, 1.0).learner.objective.kl_coef == 0.1
