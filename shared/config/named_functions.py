"""Functions that a registry names, so that a recipe can be checked without importing them; they are imported where they
are used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from shared.util.import_failures import import_failure

NamedFunction = str | Callable[..., Any]
"""`package.module:function`, or the function itself."""


def load_function(function: NamedFunction, entry: str) -> Callable[..., Any]:
    """Return the function. Raise ValueError, in one line, if there is none under that name, or if its module fails
    while it is imported; `entry` says whose it is."""
    loaded = function
    if isinstance(function, str):
        module, _, name = function.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), name)):
            raise ValueError(f"{entry} names {function!r}; write it as package.module:function")
        try:
            loaded = getattr(import_module(module), name)
        except (ModuleNotFoundError, AttributeError) as error:
            raise ValueError(
                f"{entry} names {function!r}, which cannot be imported ({error}); mend that name"
            ) from error
        except Exception as error:  # whatever the module raises while it is imported
            reason = import_failure(error)
            raise ValueError(
                f"{entry} names {function!r}, whose module fails while it is imported ({reason}); mend it"
            ) from error
    if not callable(loaded):
        raise ValueError(f"{entry} names {function!r}, which is no function; mend that name")
    return loaded
