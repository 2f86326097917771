"""What an environment behind HTTP and its player send each other: JSON, with images as files beside it.

    POST   /task                        {"args"}                       -> {"system_prompt"}
    POST   /sessions/ID/calls/0         {"call": "reset", "sample", "args"}   -> {"observation", "info"}
    POST   /sessions/ID/calls/N         {"call": "step", "text"}       -> {"observation", "done", "info"}
                                        {"call": "reset"}              -> {"observation", "info"}
                                        {"call": "episode_reward"}     -> {"reward"}
    DELETE /sessions/ID                                                -> {}
    GET    /health                                                     -> {"module", "sessions"}

The player chooses ID and numbers its calls; a call that is sent again gets the first answer again. An observation is {}
or {"messages": chat messages}. What the environment raises is {"error", "text", "place", "trace"}. A body with images
is multipart/form-data: a part of JSON, in which {"$file": 0} stands for the first of the files that follow it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image as PILImage

from shared.rgb_images import as_png, open_image, plain_file

JSON_TYPE = "application/json"
FILE = "$file"
MAX_FILES = 64
MAX_BYTES = 64 << 20  # of a body
MAX_NUMBERS = 1 << 16  # of an array in an info
MAX_CALLS = 10_000  # of a session
SESSION_ID = re.compile(r"[0-9a-f]{32}")
_HEAD = re.compile(rb"\A--([0-9A-Za-z'()+_,./:=? -]{1,70})\r\n")


def encoded(value: Any) -> tuple[str, bytes]:
    """Return the content type and the body of a value: images become PNG files, numbers and arrays of NumPy plain ones,
    and what is no plain data the name of its type. Raise ValueError for more than is sent at once."""
    files: list[bytes] = []
    body = json.dumps(_plain(value, files)).encode()
    if not files:
        return JSON_TYPE, body
    if len(files) > MAX_FILES:
        raise ValueError(f"{len(files)} images at once, limit {MAX_FILES}")
    boundary = secrets.token_hex(16)
    parts = [(b'name="body"', JSON_TYPE.encode(), body)]
    parts += [
        (b'name="file%d"; filename="%d.png"' % (index, index), b"image/png", data) for index, data in enumerate(files)
    ]
    written = b"".join(
        b"--%b\r\nContent-Disposition: form-data; %b\r\nContent-Type: %b\r\n\r\n%b\r\n"
        % (boundary.encode(), name, kind, data)
        for name, kind, data in parts
    )
    return f"multipart/form-data; boundary={boundary}", written + b"--%b--\r\n" % boundary.encode()


def decoded(data: bytes) -> Any:
    """Return the value of a body, with PIL images. Raise ValueError, in one line, for one of another form."""
    files: list[bytes] = []
    if head := _HEAD.match(data):
        boundary = b"\r\n--" + head[1]
        parts = (b"\r\n" + data).split(boundary)[1:]
        if not parts or not parts[-1].startswith(b"--"):
            raise ValueError("a multipart body that is cut off")
        if len(parts) > MAX_FILES + 2:
            raise ValueError(f"a multipart body of more than {MAX_FILES} files")
        bodies = [part.partition(b"\r\n\r\n")[2] for part in parts[:-1]]
        data, files = bodies[0], bodies[1:]
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"no JSON: {data[:60]!r}") from None
    return _with_files(value, files.__getitem__, 0)


def _with_files(value: Any, file: Callable[[int], bytes], depth: int) -> Any:
    if depth > 64:
        raise ValueError("values within values, more than 64 deep")
    if isinstance(value, list):
        return [_with_files(each, file, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    if FILE not in value:
        return {name: _with_files(each, file, depth + 1) for name, each in value.items()}
    number = value[FILE]
    try:
        data = file(number) if type(number) is int and number >= 0 else None
    except IndexError:
        data = None
    if data is None:
        raise ValueError(f"file {number!r} is missing")
    try:
        return open_image(plain_file(data))
    except ValueError as error:
        raise ValueError(f"file {number} is no image: {error}") from None


def _plain(value: Any, files: list[bytes]) -> Any:
    if isinstance(value, PILImage.Image):
        files.append(as_png(value))
        return {FILE: len(files) - 1}
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, np.ndarray) and value.size <= MAX_NUMBERS:
        value = value.tolist()
    if isinstance(value, dict):
        return {str(name): _plain(each, files) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, files) for each in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value if value is None or isinstance(value, bool | int | float) else f"({type(value).__name__})"
