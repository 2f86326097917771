"""What went wrong elsewhere with images and tokens, each under its public address, shown not to go wrong here.

`project#number` is an issue or pull request on GitHub: verl-project/verl, langfengQ/verl-agent, THUDM/slime,
huggingface/trl, StarsfieldAI/R1-V, sgl-project/sglang, vllm-project/vllm. SGLang's server:
tests/launch/engines/test_probe.py, tests/sglang/test_weights.py.
"""

import asyncio
import shutil

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from actor.env_threads import EnvThreads
from learner.model.policy import load_policy
from shared.engine.engine_api import EngineClient
from shared.types import Completion, Ending, Image, Sampling, VersionSpan
from tests.support.engine_weights_rig import Publisher, engine
from tests.support.episodes import gap, packed, plain_logprobs
from tests.support.rollout_rig import Counting, play, play_briefly, renderer, threads
from tests.support.tiny import draw_image, load_model, logprobs_under, png, reference_logits, running_engine

__all__ = ["engine", "renderer", "threads"]  # fixtures

TOLERANCE = 1e-4  # of a logprob
IMAGE_PAD = "<|image_pad|>"


@pytest.fixture(scope="module")
def played(folder, renderer):
    """Three turns, each with a picture, on the embedded engine; and the client, which knows every request."""
    pool = EnvThreads(1)
    with running_engine(folder, max_context=1024) as (url, _):
        yield play_briefly(url, renderer, pool)
    pool.close()


# ---------------------------------------------------------------------- image tokens


def spelled(renderer):
    """An answer that spells an image's placeholder letter by letter."""
    ids = [id for letter in IMAGE_PAD for id in renderer.tokenizer.encode(letter)] + [renderer.end_id]
    return Completion(tuple(ids), (-0.5,) * len(ids), (VersionSpan(1, 0, len(ids)),), "stop")


def test_an_answer_that_spells_an_image_token_is_no_image(folder, spec, renderer, threads):
    """verl#3469, verl-agent#202: after some steps the learner dies of "Image features and image tokens do not match:
    tokens: 1297, features 1296". An answer that spells an image's token does that where its text is tokenised anew."""
    trajectory, _ = play(renderer, threads, [spelled(renderer), "end"])
    assert trajectory.ending is Ending.COMPLETED and len(trajectory.images) == 2
    assert trajectory.token_ids.tolist().count(renderer.image_id) == 2
    assert renderer.tokenizer.encode(trajectory.text).count(renderer.image_id) == 3  # tokenised anew it would be one
    policy = load_policy(str(folder), spec)
    batch = packed(policy, [trajectory])
    assert len(batch.visual_positions) == len(batch.patches) / spec.merge_size**2 == 2 * 4
    assert policy(batch, 1.0).logprobs.isfinite().all()


def test_a_spelled_image_token_that_an_environment_repeats_is_text(renderer, threads):
    """verl#3469: the same words, as an environment shows them again; they are letters, and no image's place."""

    class Parrot(Counting):
        def step(self, text):
            self.heard.append(text)
            return self.look(f"You said: {text}"), text == "end", {}

    trajectory, _ = play(renderer, threads, [spelled(renderer), "end"], env=Parrot)
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert (trajectory.token_ids == renderer.image_id).sum() == len(trajectory.images)
    assert f"You said: {IMAGE_PAD}" in trajectory.text


def test_a_policy_that_would_write_image_tokens_writes_none_and_learns_from_what_it_wrote(
    folder, spec, renderer, threads, tmp_path
):
    """trl#3847, R1-V#91: a model writes an image token, for which the learner has no features; users take it out
    of what was sampled. Nothing is taken out here: engine and learner both normalise without the vision tokens."""
    model = load_model(folder)
    towards = torch.randn(model.config.text_config.hidden_size, generator=torch.Generator().manual_seed(0))
    wanted = [model.config.image_token_id, model.config.video_token_id]
    with torch.no_grad():  # whatever the model has read, one of the two is by far the likeliest
        model.lm_head.weight[wanted] = 50 * torch.stack([towards, -towards])
    shutil.copytree(folder, tmp_path / "insistent", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(tmp_path / "insistent")
    with running_engine(tmp_path / "insistent", max_context=1024) as (url, _):
        trajectory, client = play_briefly(url, renderer, threads)
    for (token_ids, images), answer in zip(client.requests, client.answers, strict=True):
        drawn = [draw_image(64, 64, n) for n in range(len(images))]
        logits = reference_logits(model, [*token_ids, *answer.token_ids], drawn, spec)[len(token_ids) - 1 : -1]
        assert set(logits.argmax(-1).tolist()) <= {*wanted}
        assert not set(answer.token_ids) & {*renderer.banned_ids}
    assert gap(load_policy(str(tmp_path / "insistent"), spec), trajectory) < TOLERANCE


# ---------------------------------------------------------------------- a model that cannot see


def test_every_turn_sees_its_own_picture(folder, spec, played):
    """slime#1847, slime#1803: from some turn on the model is not shown the pictures, and writes that they are blank."""
    trajectory, client = played
    assert [len(images) for _, images in client.requests] == [1, 2, 3]
    model, written = load_model(folder), np.flatnonzero(trajectory.loss_mask)
    engines = torch.from_numpy(trajectory.behaviour_logprobs[written])
    torch.testing.assert_close(engines, plain_logprobs(model, trajectory, spec), rtol=0, atol=TOLERANCE)
    blank = Image.of(png(draw_image(64, 64, 99)))
    for number, turn in enumerate(trajectory.turns):
        images = [*trajectory.images]
        images[number] = blank
        blind = plain_logprobs(model, replace(trajectory, images=tuple(images)), spec)
        own = torch.from_numpy((written >= turn.start) & (written < turn.end))
        assert (blind - engines)[own].abs().max() > 100 * TOLERANCE


# ---------------------------------------------------------------------- tokens that are made anew


def test_what_was_sampled_is_never_tokenised_anew(folder, spec, renderer, played):
    """verl#3720, trl#5224: answers are decoded and encoded again between turns, or for training, which makes other
    tokens than those that the engine sampled, whose logprobs it told; verl#6501: the newline after a turn is lost."""
    trajectory, client = played
    sampled = [list(answer.token_ids) for answer in client.answers]
    encoded_again = [renderer.tokenizer.encode(renderer.tokenizer.decode(ids)) for ids in sampled]
    assert encoded_again != sampled  # the test would see it
    requests = [token_ids for token_ids, _ in client.requests]
    for earlier, answer, later in zip(requests, sampled, requests[1:], strict=False):
        assert later[: len(earlier) + len(answer)] == earlier + answer
        after = renderer.transcript(later[len(earlier) + len(answer) :])
        assert after.removeprefix("<|im_end|>").startswith("\n<|im_start|>user\n")
    assert trajectory.token_ids.tolist() == requests[-1] + sampled[-1]
    assert gap(load_policy(str(folder), spec), trajectory) < TOLERANCE


# ---------------------------------------------------------------------- stale embeddings


def test_a_changed_vision_tower_is_seen_at_once(folder, spec, engine):
    """vllm#44910, verl#6523, trl#7198, sglang#36468: engines keep an image's embedding beyond an update of the tower
    that made it. No image's features outlive the weights that made them here."""
    url, _ = engine
    new = load_model(folder)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if ".visual." in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    drawn = draw_image(64, 64, 1)
    prompt = [21, spec.image_token_id, 22, 31]

    async def main():
        publisher = await Publisher.connected(url)
        client = EngineClient(url)
        images = [Image.of(png(drawn))]
        await client.generate(prompt, images, Sampling(max_new_tokens=3))
        await publisher.publish(new, "1")
        return await client.generate(prompt, images, Sampling(max_new_tokens=9), banned_ids=spec.banned_ids)

    out = asyncio.run(main())
    expected = logprobs_under(new, spec, prompt, out.token_ids, [drawn])
    torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)
