"""Engines, and proxies before them, are asked whether they keep what a request says before anything starts."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from launch.engines.engine_supervisor import check_router, wait_until_serving
from launch.engines.probe import ModelFacts
from shared.engine.engine_api import EngineError
from shared.vision import VisionSpec
from tests.support.engines import call, false_engine, says
from tests.support.tiny import running_engine

MODEL = "launch/models/colour_tiny"


@pytest.fixture(scope="module")
def engine():
    with running_engine(MODEL) as (url, _):
        yield url


@pytest.fixture(scope="module")
def facts():
    return ModelFacts.load(MODEL, VisionSpec.load(MODEL))


def passes_on(engine, *, without=(), busy=0, anew=False):
    """A proxy of /generate that drops some sampling parameters, says 503 at first, and tokenises prompts anew."""
    left, tokenizer = [busy], Tokenizer.from_file(f"{MODEL}/tokenizer.json")

    def answer(request, body):
        if left[0]:
            left[0] -= 1
            return says({"error": "no workers yet"}, 503)(request, body)
        kept = {name: value for name, value in body["sampling_params"].items() if name not in without}
        if anew:
            body["input_ids"] = tokenizer.encode(tokenizer.decode(body["input_ids"], skip_special_tokens=False)).ids
        says(call(engine, "/generate", body | {"sampling_params": kept}, 30.0))(request, body)

    return {"/generate": answer, "/health": says(b"OK")}


def test_an_engine_that_keeps_bans_and_images_serves(engine, facts):
    wait_until_serving((engine,), [], facts, 30.0)
    assert call(engine, "/server_info")["refused"] == {}, "nothing that a sound start asks is refused, or warned of"


def test_an_engine_with_another_vocabulary_is_refused(engine, facts):
    other = replace(facts, probe_ids=facts.probe_ids[:-1])
    with pytest.raises(EngineError, match="other tokens of the same text"):
        wait_until_serving((engine,), [], other, 30.0)


def test_a_broken_tokenizer_is_named(tmp_path):
    shutil.copy(f"{MODEL}/config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"/tokenizer\.json cannot be read as a tokenizer \(Model missing"):
        ModelFacts.load(str(tmp_path), VisionSpec.load(MODEL))


def test_a_text_that_is_too_long_is_not_tokenised(engine):
    with pytest.raises(EngineError, match="the limit is 65536"):
        call(engine, "/tokenize", {"prompt": "a" * 70_000})
    assert call(engine, "/tokenize", {"prompt": "", "add_special_tokens": False}) == {"tokens": [], "count": 0}


def test_a_proxy_that_passes_requests_on_is_waited_for_and_taken(engine, facts):
    with false_engine(passes_on(engine, busy=2)) as (url, seen):
        check_router(url, facts, 30.0)
    assert [path for path, _ in seen].count("/generate") == 4  # two refusals, the likeliest token, the banned one


def test_a_proxy_that_loses_bans_is_refused(engine, facts):
    with (
        false_engine(passes_on(engine, without=["logit_bias"])) as (url, _),
        pytest.raises(EngineError, match="loses logit_bias"),
    ):
        check_router(url, facts, 30.0)


def test_an_engine_that_tokenises_prompts_anew_is_refused(engine, facts):
    """sglang#26555: a server decodes a prompt with an image and encodes it again, so that it continues other tokens
    than the policy wrote. SGLang 0.5.23 does not, unless its variable SGLANG_MM_AVOID_RETOKENIZE is set to 0."""
    with (
        false_engine(passes_on(engine, anew=True)) as (url, _),
        pytest.raises(EngineError, match=r"makes 8 tokens of 10: .* SGLANG_MM_AVOID_RETOKENIZE left on"),
    ):
        check_router(url, facts, 30.0)


def test_a_proxy_without_engines_is_named_after_its_time(engine, facts):
    with (
        false_engine(passes_on(engine, busy=1000)) as (url, _),
        pytest.raises(EngineError, match=r"no workers yet"),
    ):
        check_router(url, facts, 1.0)
