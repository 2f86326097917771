"""Reads the contents of an exported report."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any


def held(path: Path) -> dict[str, Any]:
    """Return the report's data: answers by path, images, pages, and the address that it opens at."""
    (packed,) = re.findall(r'id="embedded">([A-Za-z0-9+/=]*)</script>', path.read_text(encoding="utf-8"))
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def scripts(path: Path) -> dict[str, str]:
    """Return the text of each of the report's scripts, by name."""
    (imports,) = re.findall(r'type="importmap">(.*?)</script>', path.read_text(encoding="utf-8"))
    uris = json.loads(imports)["imports"]
    return {name: base64.b64decode(uri.partition(",")[2]).decode() for name, uri in uris.items()}
