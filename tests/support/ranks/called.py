"""Calls a function of a test's module on ranks: python -m tests.support.ranks.called MODULE FUNCTION SIZE ARGUMENTS

ARGUMENTS is a JSON list. The ranks are forked from this process, which has computed nothing yet: one that has may hold
locks of torch's threads, for which a fork of it waits for ever.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

from tests.support.ranks.processes import in_processes

if __name__ == "__main__":
    module, function, size, arguments = sys.argv[1:]
    sys.exit(in_processes([[int(size)]], getattr(import_module(module), function), *json.loads(arguments)))
