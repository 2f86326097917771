"""What must agree between an actor and its learner: one table of settings and sources, as digests, and the difference
in words."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from shared.config.recipe import Recipe
from shared.config.reward_section import JudgeConfig
from shared.config.tasks import tasks_of
from shared.redaction import secrecy
from shared.types import AgreedSetting
from shared.vision import VisionSpec

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("actor", "envs", "kernels", "launch", "learner", "shared")  # of Pronk; its version tells that they differ
MAX_FILES = 200  # that count as a module's source
MAX_SCRIPT = 1 << 20  # bytes of a file that counts as a command's script
MAX_ARGS = 200  # of env.args of all tasks that are compared one by one
ARGS = "env.args."
PATH = re.compile(r"\S*[/\\]\S*")  # or an address
ABOUT_SECRETS = re.compile(r"(?i)(key$|api[-_]?key|token$|secret|passw|passphrase|pwd|auth|credential|private)")
"""Names that have to do with secrets, such as `private_data` and `api_key_file`, whether or not redaction hides their
values: they differ from host to host."""

AGREE: dict[str, Callable[[Recipe], AgreedSetting]] = {
    "version of Pronk": lambda recipe: AgreedSetting(pronk_version()),
    "model.path": lambda recipe: model_digest(recipe.model.path),
    "model.max_context": lambda recipe: plain(recipe.model.max_context),
    "model.min_pixels": lambda recipe: plain(recipe.model.min_pixels),
    "model.max_pixels": lambda recipe: plain(recipe.model.max_pixels),
    "env.module": lambda recipe: source_digest(recipe.env.module),
    "env.max_turns": lambda recipe: plain(recipe.env.max_turns),
    "env.max_tokens": lambda recipe: plain(recipe.env.max_tokens),
    "env.turn_tokens": lambda recipe: plain(recipe.env.turn_tokens),
    "env.history": lambda recipe: plain(recipe.env.history),
    "env.keep_images": lambda recipe: plain(recipe.env.keep_images),
    "env.reward": lambda recipe: function_digest(recipe.env.reward),
    "rollout.path": lambda recipe: function_digest(recipe.rollout.path),
    "rollout.agent": lambda recipe: function_digest(recipe.rollout.agent),
    "rollout.command": lambda recipe: command_digest(recipe.rollout.command),
    "reward.url": lambda recipe: AgreedSetting("a server" if recipe.reward.url else "none"),
    "reward.send": lambda recipe: plain(list(recipe.reward.send)),
    "reward.judge.url": lambda recipe: AgreedSetting("a server" if recipe.reward.judge.url else "none"),
    "reward.judge.model": lambda recipe: plain(recipe.reward.judge.model),
    "reward.judge.rubric": lambda recipe: rubric_digest(recipe.reward.judge),
    "reward.judge.per": lambda recipe: plain(recipe.reward.judge.per),
    "reward.judge.images": lambda recipe: plain(recipe.reward.judge.images),
    "reward.judge.weight": lambda recipe: plain(recipe.reward.judge.weight),
    "reward.judge.scale": lambda recipe: plain(list(recipe.reward.judge.scale)),
    "reward.judge.max_tokens": lambda recipe: plain(recipe.reward.judge.max_tokens),
    "reward.judge.temperature": lambda recipe: plain(recipe.reward.judge.temperature),
    "transport.max_message_bytes": lambda recipe: plain(recipe.transport.max_message_bytes),
}
"""The settings that must agree, and how their values are told; `env.args` comes on top, one by one. A source counts by
its content: the same file may have another path on each host."""
OF_A_TASK = tuple(name for name in AGREE if name.startswith(("env.", "reward.")))
"""Those that each task has for itself, if a recipe has several."""
MAY_DIFFER = (
    *("model.dtype", "env.timeout_s", "env.isolation", "env.memory_mb", "env.threads", "env.max_failure_share"),
    *("reward.timeout_s", "reward.isolation", "rollout.timeout_s", "reward.judge.concurrency"),
    *("reward.judge.cache_mb", "reward.judge.api_key_file", "reward.judge.api_key_env"),
    *("rollout.listen", "rollout.api_key_file"),
    *("transport.keys", "transport.key_name", "transport.allow_plain"),
)
"""The other settings of these sections: of one host, or of the learner alone. So are all other sections."""


def settings_of(recipe: Recipe) -> dict[str, AgreedSetting]:
    """Return what must agree, by name. A source or a model that is not found has an empty digest, which agrees with
    any."""
    tasks = tasks_of(recipe)
    settings = {name: tell(recipe) for name, tell in AGREE.items() if not recipe.tasks or name not in OF_A_TASK}
    for task in tasks:
        prefix, one = f"tasks.{task.name}." if task.name else "", task.recipe
        if task.name:
            settings |= {f"{prefix}{name}": AGREE[name](one) for name in OF_A_TASK}
        most = MAX_ARGS // len(tasks)
        settings |= {f"{prefix}{ARGS}{key}": setting for key, setting in islice(_args(one.env.args), most)}
    return settings


def difference(expected: Mapping[str, AgreedSetting], actor: str, settings: Mapping[str, AgreedSetting]) -> str:
    """Return in words what an `actor` has otherwise than the learner, whose settings are `expected`; "" if all of it
    agrees, or if the actor does not tell."""
    if not expected or not settings:
        return ""
    absent = AgreedSetting("nothing")
    parts = []
    for name in (*expected, *(name for name in settings if name not in expected)):
        ours, theirs = (each.get(name, absent if ARGS in name else AgreedSetting("")) for each in (expected, settings))
        if ours.digest and theirs.digest and ours.digest != theirs.digest:
            parts.append(f"{name}: the learner has {_words(ours)}, actor {actor} has {_words(theirs)}")
    more = f"; and {len(parts) - 3} more" if len(parts) > 3 else ""
    return "; ".join(parts[:3]) + more


def plain(value: object) -> AgreedSetting:
    """Return a setting that is its own digest."""
    return AgreedSetting(str(value)[:256])


def rubric_digest(judge: JudgeConfig) -> AgreedSetting:
    """Return the digest of a judge's rubric, which may be a file of another path on each host."""
    try:
        digest = _short(judge.rubric_text()) if judge.rubric else "none"
    except ValueError:  # told where the judge is asked
        return AgreedSetting("")
    return AgreedSetting(digest, f"{judge.rubric[:200]} ({digest})" if judge.rubric else "none")


def pronk_version() -> str:
    """Return the version of this Pronk; "" if its pyproject.toml is not there."""
    path = ROOT / "pyproject.toml"
    return str(tomllib.loads(path.read_text(encoding="utf-8"))["project"]["version"]) if path.is_file() else ""


def model_digest(folder: str) -> AgreedSetting:
    """Return the digest of what turns messages and images into tokens: tokenizer, chat template, image processor. The
    weights do not count, since the learner sends them."""
    path = Path(folder)
    parts: list[Any] = []
    try:
        tokenizer = json.loads((path / "tokenizer.json").read_bytes())
        model = tokenizer.get("model") or {}
        # Merges are written as "a b" or as ["a", "b"].
        model["merges"] = [
            "\n".join(m) if isinstance(m, list) else m.replace(" ", "\n") for m in model.get("merges", ())
        ]
        names = ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor")
        parts += [tokenizer.get(name) for name in names]
        config = path / "tokenizer_config.json"
        template = path / "chat_template.jinja"
        if template.is_file():
            parts.append(template.read_text(encoding="utf-8"))
        elif config.is_file():
            parts.append(json.loads(config.read_bytes()).get("chat_template"))
        spec = VisionSpec.load(folder)
        parts += [spec.image_token_id, spec.patch_size, spec.merge_size, spec.temporal_patch_size, spec.mean, spec.std]
        parts.append(spec.banned_ids)
    except (OSError, ValueError, AttributeError):
        return AgreedSetting("")
    digest = _short(json.dumps(parts, sort_keys=True))
    return AgreedSetting(digest, f"{folder[-300:]} (tokenizer, template and image processor {digest})")


def function_digest(path: str) -> AgreedSetting:
    """Return the digest of a function `package.module.name` or `file.py:name`: its name, and its module's source."""
    if not path:
        return AgreedSetting("none")
    module, _, name = path.rpartition(":" if ".py:" in path else ".")
    source = source_digest(module)
    return AgreedSetting(f"{name} {source.digest}", f"{name} of {source.shown}"[:512]) if source.digest else source


def command_digest(command: str) -> AgreedSetting:
    """Return the digest of a command: its words, those that are scripts told by their source, the program without its
    folder."""
    if not command:
        return AgreedSetting("none")
    program, *words = shlex.split(command)
    told = [_script(program) or Path(program).name, *(_script(word) or word for word in words)]
    digest = _short("\0".join(told))
    return AgreedSetting(digest, f"{command[:300]!r} (words and scripts {digest})")


def _script(word: str) -> str:
    """Return the source of the script that a word of a command names; "" if it names none."""
    path = Path(word)
    try:
        return _source(path) if path.suffix and path.is_file() and path.stat().st_size <= MAX_SCRIPT else ""
    except OSError:
        return ""


def source_digest(module: str) -> AgreedSetting:
    """Return the digest of the source of a module, given as a dotted path or as a `.py` file, and of the modules beside
    it that it imports, directly or not."""
    file = _file_of(module)
    if file is None:
        return AgreedSetting("")
    files = _with_imports(file, dotted=not module.endswith(".py"))
    sources = sorted({_source(path) for path in files})
    digest = _short("\0".join(sources))
    and_more = f" and {len(files) - 1} files that it imports" if len(files) > 1 else ""
    return AgreedSetting(digest, f"{str(file)[-300:]}{and_more} (source {digest})")


def _file_of(module: str) -> Path | None:
    if module.endswith(".py"):
        path = Path(module)
        return path.resolve() if path.is_file() else None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    return origin.resolve() if origin is not None and origin.suffix == ".py" and origin.is_file() else None


def _with_imports(file: Path, *, dotted: bool) -> list[Path]:
    """Return a file and the files that it imports from its own folder, or from its package if it is a `dotted` one."""
    root, package = file.parent, ""
    if dotted:
        while (root / "__init__.py").is_file():
            root, package = root.parent, root.name
    files = [file]
    for path in files:
        for name in _imported(path, root):
            top = name.partition(".")[0]
            if top != package if package else top in PACKAGES:
                continue
            base = root.joinpath(*name.split("."))
            for candidate in (base.with_suffix(".py"), base / "__init__.py"):
                if candidate.is_file() and candidate not in files and len(files) < MAX_FILES:
                    files.append(candidate)
    return files


def _imported(path: Path, root: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, relative ones as seen from `root`."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    here = path.parent.relative_to(root).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (*here[: len(here) + 1 - node.level], *filter(None, [node.module])) if node.level else (node.module,)
            name = ".".join(part for part in base if part)
            if name:
                yield name
            yield from (f"{name}.{alias.name}".lstrip(".") for alias in node.names)


def _source(path: Path) -> str:
    """Return a file's text without what editors and systems change of it: the ends of lines."""
    return "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()).strip()


def _args(args: Mapping[str, Any]) -> Iterator[tuple[str, AgreedSetting]]:
    """Yield the settings of `env.args` that must agree. Secrets are left out, and so are paths and addresses, which
    differ from host to host. A text is told by 16 bits: enough to notice a difference, too little to find it out."""
    for key in sorted(args):
        value = args[key]
        if _is_secret(key) or (isinstance(value, str) and PATH.fullmatch(value)):
            continue
        text = json.dumps(_without_secrets(value), sort_keys=True, default=str)
        if '"' not in text and len(text) < 100:
            yield key[:200], plain(text)
        else:
            digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:4]
            yield key[:200], AgreedSetting(digest, f"a value with digest {digest}")


def _is_secret(name: str) -> bool:
    """Tell whether a setting of this name is never compared, since a digest of a short secret tells it."""
    return secrecy(name) == "sure" or ABOUT_SECRETS.search(name) is not None


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_secrets(each) for key, each in value.items() if not _is_secret(str(key))}
    if isinstance(value, list | tuple):
        return [_without_secrets(each) for each in value]
    return "a path" if isinstance(value, str) and PATH.fullmatch(value) else value


def _short(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def _words(setting: AgreedSetting) -> str:
    return setting.shown or setting.digest
