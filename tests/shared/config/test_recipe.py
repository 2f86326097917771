"""Recipes: strict, layered, and one clear line for each mistake."""

from __future__ import annotations

import ast
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import pytest
from pydantic import BaseModel

from shared.config.recipe import MAIN_FIELDS, NO_ENV, ConfigError, Recipe, known_fields, load_recipe
from shared.config.sections import Section

RECIPES = sorted(Path("launch/recipes").glob("*.toml"))
MINIMAL = '[model]\npath = "m"\n[env]\nmodule = "envs.colour"\n'


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_in_the_repository_loads(path: Path) -> None:
    recipe = load_recipe(str(path))
    assert Path(recipe.model.path, "config.json").exists() or "/" in recipe.model.path


def test_the_command_line_beats_the_environment_which_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, MINIMAL + "[learner]\ntotal_steps = 7\ngroup_size = 2\noptimizer.lr = 1e-3\n")
    monkeypatch.setenv("PRONK_LEARNER__OPTIMIZER__LR", "2e-3")
    monkeypatch.setenv("PRONK_LEARNER__TOTAL_STEPS", "8")
    recipe = load_recipe(path, ["--learner.optimizer.lr", "3e-3"])
    assert (recipe.learner.optimizer.lr, recipe.learner.total_steps, recipe.learner.group_size) == (3e-3, 8, 2)


def test_an_agents_recipe_needs_no_environment_and_no_journal(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\npath = "m"\n')
    recipe = load_recipe(path, ["--rollout.agent", "my_agent.py:run", "--env.max_turns", "3"])
    assert (recipe.env.module, recipe.env.max_turns, recipe.rollout.function) == (NO_ENV, 3, "my_agent.py:run")
    assert not recipe.journaled and Recipe.model_validate(recipe.model_dump()) == recipe
    assert load_recipe(path, ["--rollout.command", "node a.js"]).env.module == NO_ENV
    assert load_recipe(write(tmp_path, MINIMAL), ["--rollout.agent", "a.b"]).env.module == "envs.colour"


def test_env_args_of_file_and_command_line_are_merged(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "[env.args]\na = 1\nb = 2\n")
    assert load_recipe(path, ["--env.args", '{"b": 3}']).env.args == {"a": 1, "b": 3}
    assert load_recipe(path, ["--env.args.b", "3", "--env.args.c.d=[x", "--env.args.c.e", "-1"]).env.args == {
        **{"a": 1, "b": 3, "c": {"d": "[x", "e": -1}}
    }
    assert load_recipe(path, ["--env.args", '{"b": 3}', "--env.args.c", "false"]).env.args == {
        **{"a": 1, "b": 3, "c": False}
    }
    assert load_recipe(path, ["--data.columns.problem", "query"]).data.columns == {"problem": "query"}


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (MINIMAL + "[learner]\nlearning_rat = 1\n", [], "unknown key 'learner.learning_rat'"),
        (MINIMAL + "[learner]\ngroups_per_stp = 1\n", [], "did you mean 'learner.groups_per_step'?"),
        (MINIMAL + "[lerner]\nlr = 1\n", [], "did you mean 'learner'?"),
        (MINIMAL, ["--learner.lrr", "1"], "unknown option --learner.lrr; did you mean --learner.optimizer.lr?"),
        (MINIMAL, ["--model.path", ""], "model.path = ''"),
        (MINIMAL, ["--actor_rollout_ref.rollout.n", "8"], "did you mean --learner.group_size?"),
        (MINIMAL, ["--actor_rollout_ref.actor.optim.lr", "1e-6"], "did you mean --learner.optimizer.lr?"),
        (MINIMAL, ["--trainer.total_epochs", "8"], "did you mean --learner.total_steps?"),
        (MINIMAL, ["--actor_rollout_ref.ref.ulysses_size", "8"], "options are --section.key VALUE"),
        (MINIMAL, ["--zzzzzz", "1"], "unknown option --zzzzzz; options are --section.key VALUE"),
        (MINIMAL + '[learner.optimizer]\nlr = "fast"\n', [], "learner.optimizer.lr = 'fast'"),
        (MINIMAL, ["--learner.group_size", "0"], "learner.group_size = '0'"),
        ('[env]\nmodule = "envs.colour"\n', [], "'model.path' is required; set it in the recipe or with --model.path"),
        ('[model]\npath = "m"\n', [], "'env.module' is required; set it in the recipe or with --env.module"),
        ('model = "m"\n', [], "model is a section; set a field of it, such as model.path"),
        ("[model\n", [], "is not valid TOML"),
        (MINIMAL, ["--sampling.top_p", "0.9"], "unknown option --sampling.top_p; "),
        (MINIMAL, ["--learner.objective.name", "grpo"], "learner.group_size = 1"),
        (MINIMAL, ["--learner.objective.dynamic_sampling", "true"], "set learner.objective.name"),
        (MINIMAL, ["--sampling.temperature", "0"], "sampling.temperature = 0"),
        (MINIMAL, ["--env.turn_tokens", "9000"], "exceeds env.max_tokens = 1536"),
        (MINIMAL, ["--engine.router", "http://r"], "engine.router = 'http://r'"),
        (
            MINIMAL,
            ["--data.num_samples", "3000000000", "--eval.samples", "1"],
            "data.num_samples = 3000000000: training seeds overlap",
        ),
        (MINIMAL, ["--env.turn_tokens", "9000", "--env.max_tokens", "9000"], "no room in model.max_context"),
        (MINIMAL, ["--data.source", "x.jsonl", "--data.variants", '[{"a": 1}]'], "data.variants is for seeds"),
        (
            MINIMAL,
            ["--eval.samples", "5", "--data.first_seed", "1999999999"],
            "training seeds overlap the 5 held-out seeds",
        ),
        (
            MINIMAL,
            ["--eval.every_steps", "6", "--learner.publish.every", "4"],
            "a multiple of learner.publish.every = 4",
        ),
        (MINIMAL, ["--env.reward", "a.b", "--reward.url", "http://c"], "leave one of them out"),
        (MINIMAL, ["--rollout.path", "a.b", "--rollout.agent", "c.d"], "rollout.agent = 'c.d': leave one of them out"),
        (
            MINIMAL,
            ["--rollout.agent", "a.b", "--env.history", "2"],
            "env.history = 2 and rollout.agent = 'a.b'",
        ),
        (MINIMAL, ["--rollout.agent", "a.b", "--env.keep_images", "1"], "leave env.keep_images out"),
        (
            MINIMAL,
            ["--rollout.agent", "a.b", "--env.isolation", "process"],
            "an agent plays no environment of the actor",
        ),
        (MINIMAL, ["--rollout.listen", "a:1", "--env.history", "2"], "env.history = 2 and rollout.listen = 'a:1'"),
        (MINIMAL, ["--rollout.listen", "a:1", "--rollout.agent", "a.b"], "leave one of them out"),
        (
            MINIMAL,
            ["--rollout.agent", "a.b", "--rollout.command", "node x.js"],
            "rollout.agent = 'a.b' and rollout.command = 'node x.js': leave one of them out",
        ),
        (
            MINIMAL,
            ["--rollout.command", "a 'b"],
            'rollout.command = "a \'b": No closing quotation',
        ),
        (MINIMAL, ["--rollout.command", " "], "rollout.command = ' ' names no program"),
        (MINIMAL, ["--rollout.command", "a", "--env.history", "2"], "env.history = 2 and rollout.command = 'a'"),
        (MINIMAL, ["--rollout.listen", "8600"], "write it as HOST:PORT, such as 127.0.0.1:8600"),
        (MINIMAL, ["--rollout.api_key_file", "k"], "rollout.api_key_file = 'k' without rollout.listen"),
        (MINIMAL, ["--env.max_failure_share", "1.5"], "env.max_failure_share = '1.5'"),
        (MINIMAL, ["--actor.groups", "100000"], "actor.processes x actor.groups = 100000"),
        (MINIMAL, ["--actor.groups", "0", "--engine.count", "0"], "nobody would play or generate"),
        (MINIMAL, ["--data.variants", "[{a=1}]"], "--data.variants = '[{a=1}]' is not JSON: "),
        (MINIMAL, ["--data.variants=[{a=1}]"], "write it like '[{\"name\": 1}]'"),
        (MINIMAL, ["--data.variants", "3"], "command line: data.variants.0 = 3"),
        (
            MINIMAL,
            ["--data.first_seed", "9" * 23],
            f"data.first_seed = '{'9' * 23}': input should be less than {2**63}",
        ),
        (MINIMAL, ["--data.first_seed", "-1"], "data.first_seed = '-1': input should be greater than or equal to 0"),
        (MINIMAL, ["--data.first_seed", str(2**63 - 5), "--data.num_samples", "6"], "data.num_samples = 6: seeds end"),
        (MINIMAL, ["--data.first_seed", "9" * 23], f"data.first_seed = '{'9' * 23}': input should be less"),
        (MINIMAL, ["--env.args", "size=[7,7]"], "--env.args = 'size=[7,7]' is not JSON: "),
        (
            MINIMAL,
            ["--env.args.size"],
            "--env.args.size; write --env.args '{\"size\": VALUE}'",
        ),
        (MINIMAL, ["--learner.optimizer.freeze", "[vision"], "write it like '[\"vision\"]'"),
        (MINIMAL, ["--learner.optimizer.betas", "0.9"], "learner.optimizer.betas = [0.9]: too few values"),
        (MINIMAL, ["--run.name", ""], "run.name = ''"),  # its folder would be that of all runs
        (MINIMAL, ["--run.name", ".."], "run.name = '..': its folder is DIR/NAME: no / and no leading dot"),
        (MINIMAL, ["--data"], "--data without a value: data is a section; set a field of it, such as data.source"),
        (MINIMAL, ["--data", "--run.name", "a"], "--data without a value: data is a section"),
        (MINIMAL, ["--run.name", "a/b"], "run.name = 'a/b'"),
        (MINIMAL, ["--learner", "{"], "--learner = '{': learner is a section; set a field of it, such as learner.bind"),
        (MINIMAL, ["--learner", "5"], "--learner = '5': learner is a section; set a field of it, such as learner.bind"),
        (MINIMAL, ["--learner", '{"bogus": 3}'], "command line: unknown key 'learner.bogus'"),
        (MINIMAL, ["--learner.optimizer", '{"lr": 1}', "--zzzzzz", "1"], "unknown option --zzzzzz"),
        (MINIMAL, ["learner.optimizer.lr=1"], "is no option; write it with two dashes, --learner.optimizer.lr"),
        (MINIMAL, ["-learner.total_steps", "3"], "is no option; write it with two dashes, --learner.total_steps"),
        (MINIMAL, ["--learner.total_steps", "3", "extra"], "'extra' is no option; options are --section.key VALUE"),
        (MINIMAL, [""], "'' is no option; options are --section.key VALUE"),
        (MINIMAL, ["--model.min_pixels", "9000000"], "exceeds model.max_pixels = 1048576; lower it"),
        (MINIMAL, ["--learner.objective.pg_rho_bar", "-1"], "learner.objective.pg_rho_bar = '-1'"),
        (MINIMAL, ["--learner.objective.rho_bar", "-1"], "learner.objective.rho_bar = '-1'"),
        (MINIMAL, ["--learner.objective.c_bar", "-1"], "learner.objective.c_bar = '-1'"),
        (MINIMAL, ["--learner.optimizer.betas", "[1.5, 0.9]"], "learner.optimizer.betas.0 = 1.5"),
        (MINIMAL, ["--learner.optimizer.betas", "[0.9, -2]"], "learner.optimizer.betas.1 = -2"),
        (MINIMAL, ["--learner.objective.entropy_coef", "nan"], "entropy_coef = 'nan': input should be a finite number"),
        (MINIMAL + "[learner.objective]\nreward_scale = nan\n", [], "reward_scale = nan: input should be a finite"),
        (MINIMAL, ["--learner.optimizer.lr", "inf"], "learner.optimizer.lr = 'inf': input should be a finite number"),
        (MINIMAL, ["--learner.objective.rho_bar", "inf"], "rho_bar = 'inf': input should be a finite number"),
    ],
)
def test_a_mistake_is_one_line_that_names_value_and_cure(
    tmp_path: Path, text: str, overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, text), overrides)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PRONK_ENGINE__URLS", "http://a", "PRONK_ENGINE__URLS = 'http://a' is not JSON: "),
        ("PRONK_LEARNER__OPTIMIZER__BETAS", "(0.9, 0.95)", "write it like '[1, 2]'"),
        ("PRONK_LEARNER__TOTAL_STEPS", "x", "PRONK_LEARNER__TOTAL_STEPS: learner.total_steps = 'x'"),
        ("PRONK_LERNER__TOTAL_STEPS", "4", "unknown section 'lerner'; did you mean PRONK_LEARNER__TOTAL_STEPS?"),
        ("PRONK_ZZ__QQ", "4", "PRONK_ZZ__QQ: unknown section 'zz'; sections are run, model, env, "),
        ("PRONK_LEARNER_TOTAL_STEPS", "4", "is no field's variable; did you mean PRONK_LEARNER__TOTAL_STEPS?"),
        ("PRONK_LEARNER_OPTIMIZER_LR", "4", "did you mean PRONK_LEARNER__OPTIMIZER__LR?"),
        ("PRONK_LEARNER", "5", "PRONK_LEARNER = '5': learner is a section; set a field of it, such as learner.bind"),
        ("PRONK_LEARNER", '{"total_steps": 1, "bogus": 3}', "PRONK_LEARNER: unknown key 'learner.bogus'; did you mean"),
        ("PRONK_LEARNER", '{"total_steps": "x"}', "PRONK_LEARNER: learner.total_steps = 'x': input should be"),
        ("PRONK_LEARNER__LR", "1", "PRONK_LEARNER__LR: unknown key 'learner.lr'; did you mean 'learner.optimizer.lr'?"),
        (
            "PRONK_LEARNER__OPTIMIZER",
            "5",
            "PRONK_LEARNER__OPTIMIZER = '5': learner.optimizer is a section; set a field",
        ),
        ("PRONK_LEARNER__TOTAL_STEP", "4", "PRONK_LEARNER__TOTAL_STEP: unknown key 'learner.total_step'; did you mean"),
    ],
)
def test_a_mistake_in_the_environment_names_its_variable(tmp_path, monkeypatch, name, value, expected) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, MINIMAL), ["--learner.group_size", "2"])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("lr", "optimizer.lr"),
        ("gamma", "objective.gamma"),
        ("microbatch_tokens", "parallel.microbatch_tokens"),
        ("publish_timeout_s", "publish.timeout_s"),
    ],
)
@pytest.mark.parametrize("how", ["recipe", "command line", "environment"])
def test_a_field_without_its_section_is_refused_with_its_whole_name(tmp_path, monkeypatch, how, short, full) -> None:
    if how == "environment":
        monkeypatch.setenv(f"PRONK_LEARNER__{short.upper()}", "1")
    path = write(tmp_path, MINIMAL + (f"[learner]\n{short} = 1\n" if how == "recipe" else ""))
    with pytest.raises(ConfigError, match=rf"learner\.{short}.*did you mean \W*learner\.{full}\W*$"):
        load_recipe(path, [f"--learner.{short}", "1"] if how == "command line" else [])


@pytest.mark.parametrize("section", ["objective", "optimizer"])
@pytest.mark.parametrize("how", ["recipe", "command line", "environment"])
def test_a_value_for_a_section_is_refused(tmp_path, monkeypatch, how, section) -> None:
    if how == "environment":
        monkeypatch.setenv(f"PRONK_LEARNER__{section.upper()}", "grpo")
    path = write(tmp_path, MINIMAL + (f'[learner]\n{section} = "grpo"\n' if how == "recipe" else ""))
    expected = f"learner.{section} is a section; set a field of it, such as learner.{section}.name$"
    with pytest.raises(ConfigError, match=expected):
        load_recipe(path, [f"--learner.{section}", "grpo"] if how == "command line" else [])


def test_a_section_is_taken_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONK_LEARNER", '{"total_steps": 7}')
    learner = load_recipe(write(tmp_path, MINIMAL), ["--learner.optimizer", '{"lr": 0.5}']).learner
    assert (learner.total_steps, learner.optimizer.lr) == (7, 0.5)


def test_a_recipe_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "\ufeff" + MINIMAL)).model.path == "m"


@pytest.mark.parametrize("word", ["Never", "AUTO", "true", "none", " never", ""])
def test_a_word_that_is_no_checkpoint_is_told_the_words_that_there_are(tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, MINIMAL), ["--learner.resume", word])
    assert str(caught.value) == f"learner.resume = {word!r}: write auto, never, or the folder of a checkpoint"


def test_a_checkpoint_whose_folder_is_called_like_a_word_is_taken(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, MINIMAL), ["--learner.resume", "./true"]).learner.resume == "./true"


def test_a_missing_recipe_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere\.toml' does not exist"):
        load_recipe("nowhere.toml")


def test_a_recipe_that_is_no_text_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be read: Is a directory; give a file like launch/recipes/"
    ) as folder:
        load_recipe(str(tmp_path))
    (tmp_path / "binary.toml").write_bytes(b"\x7fELF\xd0\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml' is no text in UTF-8; give a file like") as binary:
        load_recipe(str(tmp_path / "binary.toml"))
    assert "\n" not in f"{folder.value}{binary.value}"


@pytest.mark.parametrize("field", ["learner.bind", "actor.learner"])
def test_a_malformed_address_is_refused_with_the_form(tmp_path: Path, field: str) -> None:
    forms = "tcp://HOST:PORT, or ipc://PATH (shared/wire/transports.py registers the schemes)"
    wrong = {"localhost:5555": forms, "127.0.0.1:5555": forms, "udp://127.0.0.1:5555": forms, "": forms, "tcp": forms}
    for address in ("127.0.0.1", "127.0.0.1:", ":5555", "::1:5555", "127.0.0.1:5555x", "127.0.0.1:5555/"):
        wrong[f"tcp://{address}"] = "tcp://HOST:PORT"
    for address, form in (wrong | {"ipc://": "ipc://PATH"}).items():
        with pytest.raises(ConfigError) as caught:
            load_recipe(write(tmp_path, MINIMAL), [f"--{field}", address])
        assert str(caught.value) == f"{field} = {address!r} is no address: write it as {form}"
    with pytest.raises(ConfigError, match=f"{field} = 'tcp://127.0.0.1:0': nobody can call port 0; "):
        load_recipe(write(tmp_path, MINIMAL), [f"--{field}", "tcp://127.0.0.1:0"])
    with pytest.raises(ConfigError, match=f"{field} = 'tcp://127.0.0.1:65536': there is no port 65536; "):
        load_recipe(write(tmp_path, MINIMAL), [f"--{field}", "tcp://127.0.0.1:65536"])


@pytest.mark.parametrize(
    "address",
    [
        *("tcp://127.0.0.1:1", "tcp://*:5555", "tcp://0.0.0.0:*", "tcp://[::1]:5555", "tcp://[fe80::1%eth0]:5555"),
        *("tcp://node-1.example.org:5555", "tcp://eth0:65535", "ipc:///tmp/a b", "ipc://@abstract"),
    ],
)
def test_an_address_of_any_legal_form_is_taken(tmp_path: Path, address: str) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL), ["--learner.bind", address, "--actor.learner", address])
    assert recipe.learner.bind == recipe.actor.learner == address


@pytest.mark.parametrize(
    ("bind", "host", "refused"),
    [
        ("tcp://127.0.0.1:5555", "127.0.0.1", True),
        ("tcp://127.0.0.1:5555", "localhost", True),
        ("tcp://*:5555", "127.0.0.1", True),
        ("tcp://[::]:5555", "localhost", True),
        ("tcp://10.0.0.1:5555", "10.0.0.1", True),
        ("tcp://0.0.0.0:5555", "10.0.0.1", False),  # engines of another host, or of this one: nobody knows
        ("tcp://10.0.0.1:5555", "127.0.0.1", False),
        ("tcp://127.0.0.1:5556", "127.0.0.1", False),
        ("tcp://127.0.0.1:*", "127.0.0.1", False),
        ("ipc:///tmp/5555", "127.0.0.1", False),
    ],
)
def test_engines_leave_the_learner_its_port(tmp_path: Path, bind: str, host: str, refused: bool) -> None:
    path, fields = write(tmp_path, MINIMAL), ["--learner.bind", bind, "--engine.host", host, "--engine.port", "5554"]
    assert load_recipe(path, fields).engine.count == 1
    assert load_recipe(path, [*fields, "--engine.count", "2", "--engine.urls", '["http://a:1"]']).engine.count == 2
    with pytest.raises(ConfigError) if refused else nullcontext() as caught:
        load_recipe(path, [*fields, "--engine.count", "2"])
    assert not refused or f"engine.count = 2: port 5555 is the learner's (learner.bind = {bind!r})" in str(caught.value)


def test_variables_that_are_no_fields_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DASHBOARD_TOKEN", "HEAD", "HOST", "NUMBER", "KEYS"):
        monkeypatch.setenv(f"PRONK_{name}", "x")
    for name in ("STAGE_WEIGHTS", "DRAIN_PAUSES", "GROUP_TIMEOUT_S"):
        monkeypatch.setenv(f"PRONK_{name}", "1")
    assert load_recipe(write(tmp_path, MINIMAL)).learner.total_steps == 100


def sections(section: type[BaseModel] = Recipe) -> list[type[BaseModel]]:
    inner = [info.annotation for info in section.model_fields.values() if isinstance(info.annotation, type)]
    return [section, *(each for kind in inner if issubclass(kind, BaseModel) for each in sections(kind))]


def test_no_number_of_a_recipe_may_be_infinite() -> None:
    assert all(issubclass(each, Section) and each.model_config["allow_inf_nan"] is False for each in sections())


def test_every_field_is_read_somewhere_outside_of_the_recipe() -> None:
    """A setting that nobody reads changes nothing."""
    product = [
        path
        for package in ("actor", "envs", "kernels", "launch", "learner", "shared")
        for path in Path(package).rglob("*.py")
    ]
    trees = {path: ast.parse(path.read_text()) for path in product}
    config = [tree for path, tree in trees.items() if path.parent == Path("shared/config")]
    users = defaultdict[str, set[str]](set)  # properties and methods of sections, by the fields that they read
    for function in (node for tree in config for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                users[node.attr].add(function.name)
    read = {
        node.attr
        for path, tree in trees.items()
        if path.parent != Path("shared/config")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    unread = [key for key in known_fields() if not {name := key.rpartition(".")[2], *users[name]} & read]
    assert unread == []


def test_the_reference_shows_about_thirty_fields_first() -> None:
    assert set(MAIN_FIELDS) <= known_fields().keys() and 25 <= len(MAIN_FIELDS) <= 35


def test_a_recipe_is_given_by_its_path_or_by_its_name_and_a_wrong_name_gets_the_nearest(monkeypatch, tmp_path):
    by_path = load_recipe("launch/recipes/colour_tiny.toml")
    assert load_recipe("colour_tiny") == by_path
    with pytest.raises(ConfigError, match="recipe 'color_tiny' does not exist; did you mean colour_tiny"):
        load_recipe("color_tiny")
    monkeypatch.chdir(tmp_path)
    elsewhere = load_recipe("colour_tiny")
    assert Path(elsewhere.model.path, "config.json").is_file() and Path(elsewhere.model.path).is_absolute()


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    recipe = load_recipe("colour_tiny", ["--run.dir", "~/runs", "--data.source", "~/data/a.parquet"])
    assert (recipe.run.dir, recipe.data.source) == ("/home/somebody/runs", "/home/somebody/data/a.parquet")


def test_actors_that_are_told_no_learner_take_the_port_that_it_listens_on():
    assert load_recipe("colour_tiny", ["--learner.bind", "tcp://0.0.0.0:7777"]).actor.learner == "tcp://127.0.0.1:7777"
    told = ["--learner.bind", "tcp://0.0.0.0:7777", "--actor.learner", "tcp://host:7777"]
    assert load_recipe("colour_tiny", told).actor.learner == "tcp://host:7777"


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--batch_size", "learner.groups_per_step"),
        ("--learner.train_batch_size", "learner.groups_per_step"),
        ("--num_generations", "learner.group_size"),
        ("--learning_rate", "learner.optimizer.lr"),
        ("--max-steps", "learner.total_steps"),
        ("--trainer.n-samples-per-prompt", "learner.group_size"),
    ],
)
def test_names_of_other_trainers_lead_to_ours(option, meant):
    with pytest.raises(ConfigError, match=f"did you mean --{meant}"):
        load_recipe("colour_tiny", [option, "4"])


def test_an_option_without_a_value_and_a_misspelled_variable_are_named(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"--learner.checkpoint.export has no value: write --learner.checkpoint.export t"
    ):
        load_recipe("colour_tiny", ["--learner.checkpoint.export"])
    monkeypatch.setenv("PRONK_LEARNER__OPTIMISER__LR", "1e-6")
    with pytest.raises(
        ConfigError, match=r"^PRONK_LEARNER__OPTIMISER__LR: unknown key 'learner.optimiser'; did you mean"
    ):
        load_recipe("colour_tiny")
