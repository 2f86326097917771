"""What must agree between actor and learner: every setting is decided on, a difference is named, no secret is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shared.agreement import AGREE, ARGS, MAY_DIFFER, difference, settings_of, source_digest
from shared.config.recipe import Recipe, known_fields
from shared.types import AgreedSetting, Hello
from shared.wire.codec import decode, encode

MODEL = "launch/models/colour_tiny"
TASK = '"""A task."""\n\nimport helpers\nfrom parts import shapes\n\n\ndef build_env(**_):\n    return helpers.made()\n'


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = tmp_path / "task"
    (folder / "parts").mkdir(parents=True)
    (folder / "my_env.py").write_text(TASK)
    (folder / "helpers.py").write_text("made = dict\n")
    (folder / "unused.py").write_text("x = 1\n")
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "shapes.py").write_text("from . import sizes\n")
    (folder / "parts" / "sizes.py").write_text("SIDE = 6\n")
    return folder


def recipe(**fields: object) -> Recipe:
    values: dict = {"model": {"path": MODEL}, "env": {"module": "envs.colour"}}
    for key, value in fields.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    return Recipe.model_validate(values)


def differs(ours: Recipe, theirs: Recipe) -> str:
    return difference(settings_of(ours), "host1-actor3#5", settings_of(theirs))


def test_every_setting_of_the_sections_that_actors_use_is_decided_on() -> None:
    sections = ("env.", "reward.", "rollout.", "model.", "transport.")
    fields = {name for name in known_fields() if name.startswith(sections)}
    assert fields == {name for name in AGREE if "." in name} | set(MAY_DIFFER) | {"env.args"}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model__max_context", 512, "model.max_context: the learner has 2048, actor host1-actor3#5 has 512"),
        ("model__min_pixels", 4096, "model.min_pixels: the learner has 1024, actor host1-actor3#5 has 4096"),
        ("model__max_pixels", 4096, "model.max_pixels: the learner has 1048576"),
        ("env__max_turns", 3, "env.max_turns: the learner has 8, actor host1-actor3#5 has 3"),
        ("env__max_tokens", 1000, "env.max_tokens: the learner has 1536"),
        ("env__turn_tokens", 100, "env.turn_tokens: the learner has 256"),
        ("env__module", "envs.sokoban", "env.module: the learner has "),
        ("env__reward", "envs.math_reward.episode_reward", "env.reward: the learner has none"),
        ("rollout__path", "envs.colour.build_env", "rollout.path: the learner has none"),
        ("rollout__agent", "envs.colour.build_env", "rollout.agent: the learner has none"),
        ("rollout__command", "node player.js", "rollout.command: the learner has none, actor host1-actor3#5 has 'node"),
        ("reward__url", "http://u:hunter2@h/x?token=1", "reward.url: the learner has none, actor host1-actor3#5 has a"),
        ("model__path", "launch/models/geo3k_tiny", "model.path: the learner has launch/models/colour_tiny"),
        ("transport__max_message_bytes", 2**20, "transport.max_message_bytes: the learner has 268435456"),
        ("env__args", {"side": 4}, "env.args.side: the learner has nothing, actor host1-actor3#5 has 4"),
    ],
)
def test_a_difference_is_told_by_the_name_of_its_field(field: str, value: object, words: str) -> None:
    told = differs(recipe(), recipe(**{field: value}))
    assert told.startswith(words)
    assert "\n" not in told and "hunter2" not in told


def test_what_differs_from_host_to_host_and_what_the_learner_alone_uses_agrees() -> None:
    theirs = recipe(
        env__timeout_s=99.0, env__threads=7, reward__timeout_s=9.0, rollout__timeout_s=9.0, model__dtype="bfloat16",
        run__name="other", run__dir="elsewhere", engine__port=32000, engine__count=3, actor__groups=2,
        learner__total_steps=3, transport__key_name="b", env__max_failure_share=0.9, record__every=0,
    )  # fmt: skip
    assert differs(recipe(), theirs) == ""


def test_the_scripts_of_a_command_count_by_their_source(tmp_path: Path) -> None:
    for folder, source in (("a", "print(1)\n"), ("b", "print(1)\r\n"), ("c", "print(2)\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "play.py").write_text(source)
    commands = [f"{program} {tmp_path}/{folder}/play.py --fast" for folder, program in zip("abc", "xyx", strict=True)]
    a, b, c = (recipe(rollout__command=f"/{at}/bin/{words}") for at, words in zip("abc", commands, strict=True))
    same = recipe(rollout__command=f"/b/bin/x {tmp_path}/b/play.py --fast")
    assert differs(a, same) == ""
    for other in (b, c, recipe(rollout__command=f"/a/bin/x {tmp_path}/a/play.py")):
        assert differs(a, other).startswith("rollout.command: the learner has ")


def test_the_same_source_under_another_path_agrees(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    shutil.copytree(task, other)
    monkeypatch.chdir(task)
    relative, absolute = source_digest("my_env.py"), source_digest(str(other / "my_env.py"))
    assert relative.digest == absolute.digest
    assert "and 4 files that it imports" in absolute.shown
    (other / "unused.py").write_text("x = 2\n")
    (other / "my_env.py").write_bytes(TASK.replace("\n", "\r\n").encode())
    assert source_digest(str(other / "my_env.py")).digest == relative.digest
    monkeypatch.syspath_prepend(str(other))
    assert source_digest("my_env").digest == relative.digest


@pytest.mark.parametrize("name", ["my_env.py", "helpers.py", "parts/shapes.py", "parts/sizes.py"])
def test_another_source_of_the_environment_or_of_what_it_imports_differs(task: Path, tmp_path: Path, name: str) -> None:
    other = tmp_path / "other"
    shutil.copytree(task, other)
    with (other / name).open("a") as file:
        file.write("CHANGED = 1\n")
    ours, theirs = (recipe(env__module=str(folder / "my_env.py")) for folder in (task, other))
    told = differs(ours, theirs)
    assert told.startswith("env.module: the learner has ")
    assert str(task / "my_env.py") in told and str(other / "my_env.py") in told


def test_a_source_that_is_not_there_and_an_actor_that_tells_nothing_agree() -> None:
    assert differs(recipe(), recipe(env__module="no.such.module")) == ""
    assert difference(settings_of(recipe()), "a", {}) == ""
    assert difference({}, "a", settings_of(recipe())) == ""


def test_arguments_of_the_environment_agree_but_for_secrets_paths_and_addresses() -> None:
    args = {"side": 6, "level": "hard", "API_KEY": "hunter2", "levels": "/data/a", "server": "http://u:p@h", "deep": {}}
    ours = recipe(env__args=args)
    deep = {"deep": {"token": "x", "file": "b/c"}}
    theirs = recipe(env__args=args | {"API_KEY": "other", "levels": "/mnt/b", "server": "http://h", "db_password": "1"})
    assert differs(ours, theirs) == ""
    assert (
        differs(recipe(env__args=args | deep), recipe(env__args=args | {"deep": {"token": "y", "file": "d/e"}})) == ""
    )
    assert differs(ours, recipe(env__args=args | {"side": 7})).startswith("env.args.side: the learner has 6, actor")
    assert differs(ours, recipe(env__args=args | {"level": "easy"})).startswith(
        "env.args.level: the learner has a value"
    )
    assert differs(ours, recipe(env__args={**args, "deep": [1, 2]})).startswith("env.args.deep: the learner has {}")
    assert differs(recipe(env__args={"p": "a b/c"}), recipe(env__args={"p": "a b/d"})).startswith("env.args.p")


def test_no_secret_and_no_text_can_be_found_in_what_is_sent() -> None:
    sent = settings_of(recipe(env__args={"API_KEY": "hunter2", "note": "hunter3", "nested": [{"password": "hunter4"}]}))
    text = json.dumps({name: (s.digest, s.shown) for name, s in sent.items()})
    assert "hunter" not in text and "API_KEY" not in text
    assert len(sent[ARGS + "note"].digest) == 4  # one of 65,536: a guess cannot be confirmed


@pytest.mark.parametrize(
    "name", ["pin", "pin_code", "userPin", "dsn", "session_cookie", "private_data", "api_key_file"]
)
def test_an_argument_whose_name_is_about_a_secret_is_not_sent_even_as_a_number(name: str) -> None:
    sent = settings_of(recipe(env__args={name: 1234, "deep": {name: 1234}}))
    assert ARGS + name not in sent and sent[ARGS + "deep"] == AgreedSetting("{}")


def test_settings_of_any_size_fit_into_a_message() -> None:
    args = {f"{'k' * 300}{i}": "v" * 10_000 for i in range(1000)}
    hello = Hello("a", (), 5, settings=settings_of(recipe(env__args=args)))
    assert decode(encode(hello)) == hello


def test_a_tokenizer_written_by_another_version_agrees_and_another_template_differs(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    assert differs(recipe(), recipe(model__path=str(folder))) == ""
    template = next(folder.glob("chat_template*"), None)
    if template is not None:
        template.write_text(template.read_text() + " ")
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] += " "
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert differs(recipe(), recipe(model__path=str(folder))).startswith("model.path: the learner has ")
