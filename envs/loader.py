"""Load an environment or a reward by dotted path or by the path of a `.py` file."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from envs.base import setting
from envs.env_settings import read_settings
from envs.tools.tool import tools_of
from shared.util.own_package import bind_package, hidden_by_pronk
from shared.util.user_errors import describe

_LOADING = threading.RLock()


def load_module(path: str, holds: str = "build_env") -> ModuleType:
    """Return the module at a dotted path (`envs.sokoban`) or in a file (`my_env.py`). Raise ValueError if it cannot be
    loaded; `holds` names, for the message, the function that is needed from it."""
    if not path:
        raise ValueError("env.module is empty: give a dotted path such as envs.sokoban, or a .py file")
    if path.endswith(".py") and not Path(path).is_file():
        raise ValueError(f"no file {path!r}: give the path of a .py file that holds {holds}")
    bind_package()
    try:
        return _from_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(error.name + ".")):
            if why := hidden_by_pronk(path):
                hint = f"{why}; give yours as a file: {path.replace('.', '/')}.py"
            else:
                hint = f"give a dotted path such as envs.sokoban, or a .py file, that holds {holds}"
            raise ValueError(f"no module {path!r}: {hint}") from error
        why = hidden_by_pronk(error.name or "")
        why = f"which is not there: {why}; give yours another name" if why else "which is not installed"
        raise ValueError(f"module {path!r} imports {error.name!r}, {why}") from error
    except SystemExit as error:
        hint = "put what runs as a program under if __name__ == '__main__'"
        raise ValueError(f"module {path!r} ends the process at import (SystemExit {error.code!r}): {hint}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # any exception at the import of the user's module is the user's mistake
        raise ValueError(f"module {path!r} cannot be loaded: {describe(error)}") from error


def load_env(path: str) -> Callable[..., Any]:
    """Return the `build_env` of the module at `path`. Raise ValueError if the module is missing or broken, or has no
    `build_env`."""
    return _callable_of(load_module(path), "build_env", path)


def load_function(path: str) -> Callable[..., Any]:
    """Return a function by `package.module.name` or `file.py:name`. Raise ValueError if there is none."""
    module, _, name = path.rpartition(":" if ".py:" in path else ".")
    if not module or not name or path.endswith(".py"):
        raise ValueError(f"{path!r} names no function: write package.module.function or file.py:function")
    return _callable_of(load_module(module, name), name, module)


def system_prompt(module: ModuleType, args: Any) -> str:
    """Return the system message of a task: args["system_prompt"], the module's `system_prompt(args)`, or
    SYSTEM_PROMPT; "" if that is None or missing. Raise ValueError if the function raises, or if the result is not
    text."""
    prompt = setting(args, "system_prompt")
    if prompt is not None:
        return str(prompt)
    source = getattr(module, "__file__", None) or module.__name__
    if hasattr(module, "system_prompt"):
        what = "what system_prompt(args) returns"
        try:
            text = module.system_prompt(args)
        except (Exception, SystemExit) as error:
            raise ValueError(f"system_prompt(args) of {source} raised {describe(error)}") from error
    else:
        what, text = "SYSTEM_PROMPT", getattr(module, "SYSTEM_PROMPT", None)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{what} in {source} is {type(text).__name__}, not str: make it a text, or None for none")
    return text or ""


def tool_schemas(module: ModuleType, args: Any) -> tuple[dict[str, Any], ...]:
    """Return the schemas of the tools that the model is told of: of the module's `tools(args)`, or of TOOLS; () without
    either. Raise ValueError if the function raises, or for a tool of which a model could not be told."""
    source = getattr(module, "__file__", None) or module.__name__
    made = getattr(module, "TOOLS", None)
    if callable(getattr(module, "tools", None)):
        try:
            made = module.tools(args)
        except (Exception, SystemExit) as error:
            raise ValueError(f"tools(args) of {source} raised {describe(error)}") from error
    if made is None:
        return ()
    if not isinstance(made, (list, tuple)):
        raise ValueError(f"TOOLS in {source} is {type(made).__name__}, not a list of functions")
    try:
        return tuple(tool.schema for tool in tools_of(made))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def grades_mathematics(module: ModuleType) -> bool:
    """Tell whether the module's environment grades answers by `envs.math_reward`, which it says by
    GRADES_MATHEMATICS = True."""
    return getattr(module, "GRADES_MATHEMATICS", False) is True


def check_settings(module: ModuleType, values: Mapping[str, Any], place: str) -> None:
    """Raise ValueError if the module has `SETTINGS`, a pydantic model, and one of `values` is not a field of it or not
    valid; `place` names the origin of the values in the message. `system_prompt` and `max_turns` are allowed for every
    module."""
    kind = getattr(module, "SETTINGS", None)
    if kind is None:
        return
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        raise ValueError(f"SETTINGS of {module.__name__} is {kind!r}: make it a pydantic model, or leave it out")
    names = list(kind.model_fields)
    for name in values:
        if name in names or name in ("system_prompt", "max_turns"):
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(names)) or 'none'}"
        raise ValueError(f"{place}: {module.__name__} has no setting {name!r}; {hint}")
    try:
        read_settings(kind, None, values)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def check_turn_rewards(module: ModuleType, values: Mapping[str, Any], place: str, why: str) -> None:
    """Raise ValueError, with the reason `why` turns' rewards are not trained on, for a value of a setting that changes
    these alone (`json_schema_extra={"turn_rewards": True}` in the module's `SETTINGS`)."""
    kind = getattr(module, "SETTINGS", None)
    for name, field in kind.model_fields.items() if kind is not None else ():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("turn_rewards") and values.get(name, field.default) != field.default:
            raise ValueError(f"{place}: {name} = {values[name]} changes the rewards of turns alone, and {why}")


def _from_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    name = f"env_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    with _LOADING:  # environments are built in several threads, and one would see what another has half loaded
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
