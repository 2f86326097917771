"""Find an environment or a reward by dotted path or by the path of a `.py` file."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from envs.base import setting
from envs.settings import read_settings


def load_module(path: str, holds: str = "build_env") -> ModuleType:
    """The module at a dotted path (`envs.sokoban`) or in a file (`my_env.py`). ValueError if it cannot be loaded;
    `holds` says what is wanted of it."""
    if not path:
        raise ValueError("env.module is empty: give a dotted path such as envs.sokoban, or a .py file")
    if path.endswith(".py") and not Path(path).is_file():
        raise ValueError(f"no file {path!r}: give the path of a .py file that holds {holds}")
    try:
        return _from_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(error.name + ".")):
            cure = "give a dotted path such as envs.sokoban, or a .py file"
            raise ValueError(f"no module {path!r}: {cure}, that holds {holds}") from error
        raise ValueError(f"module {path!r} imports {error.name!r}, which is not installed") from error
    except SystemExit as error:
        cure = "put what runs as a program under if __name__ == '__main__'"
        raise ValueError(f"module {path!r} ends the process at import (SystemExit {error.code!r}): {cure}") from error
    except Exception as error:  # whatever the user's module raises while it is imported is the user's mistake
        raise ValueError(f"module {path!r} cannot be loaded: {raised(error)}") from error


def load_env(path: str) -> Callable[..., Any]:
    """The `build_env` of the module at `path`. ValueError if the module is missing, broken or without it."""
    return _callable_of(load_module(path), "build_env", path)


def check_methods(env: Any) -> None:
    """ValueError if what `build_env` returned has not all methods of an environment."""
    for name in ("reset", "step", "format_observation", "close"):
        if not callable(getattr(env, name, None)):
            raise ValueError(f"build_env returned {type(env).__name__}, which has no method {name}")


def load_function(path: str) -> Callable[..., Any]:
    """A function by `package.module.name` or `file.py:name`. ValueError if there is none."""
    module, _, name = path.rpartition(":" if ".py:" in path else ".")
    if not module or not name or path.endswith(".py"):
        raise ValueError(f"{path!r} names no function: write package.module.function or file.py:function")
    return _callable_of(load_module(module, name), name, module)


def system_prompt(module: ModuleType, args: Any) -> str:
    """The system message of a task: args["system_prompt"], the module's `system_prompt(args)`, or SYSTEM_PROMPT; ""
    where that is None or missing. ValueError if the function raises, or it is no text."""
    own = setting(args, "system_prompt")
    if own is not None:
        return str(own)
    place = getattr(module, "__file__", None) or module.__name__
    if hasattr(module, "system_prompt"):
        what = "what system_prompt(args) returns"
        try:
            text = module.system_prompt(args)
        except (Exception, SystemExit) as error:
            raise ValueError(f"system_prompt(args) of {place} raised {raised(error)}") from error
    else:
        what, text = "SYSTEM_PROMPT", getattr(module, "SYSTEM_PROMPT", None)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{what} in {place} is {type(text).__name__}, not str: make it a text, or None for none")
    return text or ""


def raised(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def check_settings(module: ModuleType, values: Mapping[str, Any], place: str) -> None:
    """ValueError if the module has `SETTINGS`, a pydantic model, and one of `values` is none of its fields, or does not
    fit there; `place` has it. `system_prompt` and `max_turns` are every module's."""
    kind = getattr(module, "SETTINGS", None)
    if kind is None:
        return
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        raise ValueError(f"SETTINGS of {module.__name__} is {kind!r}: make it a pydantic model, or leave it out")
    known = list(kind.model_fields)
    for name in values:
        if name in known or name in ("system_prompt", "max_turns"):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        cure = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known)) or 'none'}"
        raise ValueError(f"{place}: {module.__name__} has no setting {name!r}; {cure}")
    try:
        read_settings(kind, None, values)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    name = f"env_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _callable_of(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
    value = getattr(module, name, None)
    if not callable(value):
        has = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))[:12]) or "nothing"
        raise ValueError(f"module {path!r} has no function {name}; it has {has}")
    return value
