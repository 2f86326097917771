"""Secrets in what is shown, written or shared: what is hidden, and what is not."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest

from launch.processes.run_folder import write_recipe
from launch.recipe_fields import recipe_toml, save_recipe
from learner.checkpoints.restoring import check_recipe
from shared.config.recipe import WITH_SECRETS, Recipe, fail, known_fields, load_recipe
from shared.log import get_logger
from shared.redaction import holds_secrets, redact, redact_text
from shared.util.user_errors import text_of

RECIPE = "launch/recipes/colour_tiny.toml"
SECRET_ARGS = {
    "API_KEY": "s3cret",
    "apikey": "s3cret",
    "accessToken": "s3cret",
    "hf-token": "s3cret",
    "tokens": ["s3cret", "s3cret2"],
    "DB_PASSWORD": "s3cret",
    "passwd": "s3cret",
    "client_secret": "s3cret",
    "credentials": {"user": "s3cret", "more": ["s3cret"]},
    "Authorization": "s3cret",
    "basic_auth": ["s3cret", "s3cret"],
    "OPENAI_KEY": "s3cret",
    "key": "s3cretAbc123456",
    "judge": [{"deep": [{"api_key": "s3cret"}]}],
    "headers": {"X": "Bearer s3cret"},
    "pairs": [["X-Api-Key", "s3cret"]],
    "variables": [{"name": "HF_TOKEN", "value": "s3cret"}],
    "command": ["curl", "--api-key", "s3cret", "--password=s3cret", "-H", "Authorization: Bearer s3cret"],
    "shell": "curl --token s3cret https://me:s3cret@host/x?key=s3cret#access_token=s3cret",
    "json": '{"api_key": "s3cret"}',
    "url": "wss://s3cret@host:1/path",
    "plain": "sk-s3cret0123456789abcdef",
}
SHOWN_ARGS = {
    "max_tokens": 5,
    "turn_tokens": "5",
    "token_ids": [1, 2],
    "tokenizer": "path/of/one",
    "tokenizer-path": "x",
    "aggregation": "token",
    "pad_token": "<pad>",
    "stop_token": "END",
    "special_tokens": ["<a>", "<b>"],
    "tokens": 512,
    "author": "Kant",
    "authority": "none",
    "compass": "north",
    "keyboard": "qwerty",
    "key": "image",
    "sort_keys": ["name"],
    "api_key_file": "/run/key",
    "password": "",
    "secret": None,
    "auth": False,
    "prompt": "what is the secret: a token or basic arithmetic? see https://example.org/page",
    "seeds": [1, 2.5, None],
}


@pytest.mark.parametrize("name", SECRET_ARGS)
def test_a_secret_is_hidden_wherever_it_stands(name: str) -> None:
    for value in ({name: SECRET_ARGS[name]}, {"a": [{name: SECRET_ARGS[name]}]}):
        redacted = redact(value)
        assert "s3cret" not in json.dumps(redacted) and holds_secrets(value) and holds_secrets(redacted)
        assert redact(redacted) == redacted, "what was redacted before is compared with what is redacted now"


def test_what_is_no_secret_is_shown() -> None:
    assert redact(SHOWN_ARGS) == SHOWN_ARGS and not holds_secrets(SHOWN_ARGS)


def test_no_field_of_a_recipe_is_hidden_for_its_name() -> None:
    recipe = load_recipe(RECIPE)
    assert recipe.model_dump(mode="json") == recipe.model_dump(mode="json", context=WITH_SECRETS)
    words = {key: f"word of {key.rpartition('.')[2]}" for key in known_fields() if key != "alarms.webhook"}
    assert {key: redact(word, key) for key, word in words.items()} == words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("engine http://me:pw@host:1/x, gone", "engine http://***@host:1/x, gone"),
        ("GET https://host/x?a=b failed", "GET https://host/x?*** failed"),
        ("PRONK_X: WANDB_API_KEY=abc.", "PRONK_X: WANDB_API_KEY=(not shown)"),
        ("unexpected token: '<' at 3", "unexpected token: '<' at 3"),
        ("policy/tokens=3.4 mean_tokens=7", "policy/tokens=3.4 mean_tokens=7"),
        ("password: expected a str", "password: expected a str"),
    ],
)
def test_a_line_keeps_all_but_its_secrets(text: str, shown: str) -> None:
    assert redact_text(text) == shown == redact_text(shown)


def test_a_long_line_takes_no_time() -> None:
    for text in ("x" * 200_000, "a-" * 100_000, "token" * 40_000, "://" * 60_000, '"' * 100_000, "key=" * 50_000):
        redact_text(text)


def recipe_with_secrets() -> Recipe:
    return load_recipe(
        RECIPE,
        [
            *("--env.args", json.dumps({"API_KEY": "s3cret", "level": "easy"}), "--alarms.webhook", "https://h/s3cret"),
            *("--reward.url", "http://me:s3cret@host/x?token=s3cret", "--engine.flags", '{"api-key": "s3cret"}'),
        ],
    )


def test_a_recipe_is_written_without_its_secrets_and_played_with_them(tmp_path: Path) -> None:
    recipe = recipe_with_secrets()
    write_recipe(recipe, tmp_path)
    written = tmp_path / "recipe.json"
    assert "s3cret" not in written.read_text() and written.stat().st_mode & 0o777 == 0o600
    assert json.loads(written.read_text())["env"]["args"]["level"] == "easy"
    write_recipe(load_recipe(RECIPE), tmp_path)
    assert written.stat().st_mode & 0o044, "nothing of it is secret"
    played = Recipe.model_validate(recipe.model_dump(mode="json", context=WITH_SECRETS))
    assert played.env.args["API_KEY"] == "s3cret" and played.reward.url == recipe.reward.url


def test_a_saved_recipe_names_the_secrets_that_it_lacks(tmp_path: Path) -> None:
    text = recipe_toml(recipe_with_secrets())
    assert "s3cret" not in text and 'level = "easy"' in text
    for name in ("env.args.API_KEY", "reward.url", "engine.flags.api-key", "alarms.webhook"):
        assert f"# {name} is not written here: set PRONK_" in text
    save_recipe(recipe_with_secrets(), tmp_path / "r.toml", "saved")
    assert load_recipe(str(tmp_path / "r.toml")).env.args == {"level": "easy"}


def test_a_run_with_secrets_resumes_and_its_differences_hold_none(caplog: pytest.LogCaptureFixture) -> None:
    recipe = recipe_with_secrets()
    check_recipe(Path("step_1"), recipe, recipe.model_dump(mode="json"))
    # one that an older Pronk wrote with its secrets
    check_recipe(Path("step_1"), recipe, recipe.model_dump(mode="json", context=WITH_SECRETS))
    other = recipe.model_dump(mode="json", context=WITH_SECRETS)
    other["env"]["args"] = {"API_KEY": "s3cret", "level": "hard"}
    with pytest.raises(ValueError, match="'hard'") as refused:
        check_recipe(Path("step_1"), recipe, other)
    assert "s3cret" not in str(refused.value)


def test_logs_and_errors_hold_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    logger, stream = get_logger("redaction"), io.StringIO()
    handler = logger.handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    before = handler.setStream(stream)
    logger.error("engine %s is gone", "http://me:s3cret@host:1")
    handler.setStream(before or stream)
    fail(ValueError("reward.url = 'http://me:s3cret@host' and env.args = {'api_key': 's3cret'}"))
    shown = stream.getvalue() + capsys.readouterr().err + text_of(ValueError("GET http://host/?token=s3cret: 401"))
    assert "s3cret" not in shown and shown.count("host") == 3
