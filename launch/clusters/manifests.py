"""Readable YAML: multi-line texts are written as blocks, and fields keep their order."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def manifest(*documents: dict[str, Any], comment: str) -> str:
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
