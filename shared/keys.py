"""Key files of the encrypted sockets, made by `python -m shared.keys`.

    python -m shared.keys keys --actors farm-a farm-b
    python -m shared.keys keys --engine            # also the engines' API key, keys/engine.key

`keys/learner.key` and `keys/allowed` stay with the learner; only `keys/farm-a.key` goes to that actor's host. A second
call adds actors and keeps the existing files. Files with secrets are readable by their owner alone (0600).
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import secrets
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import zmq

from shared.auth import AllowList, ClientKeys, ServerKeys
from shared.config import fail
from shared.sections import TransportConfig
from shared.transport import Secure

LEARNER, ALLOWED, ENGINE = "learner", "allowed", "engine"
MAX_KEY_FILE_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(r"[!-~]{40}")  # Z85, whose alphabet needs no quoting in TOML
_API_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")  # what RFC 6750 lets a bearer token be made of
_MAKE = "make keys with python -m shared.keys"


# ------------------------------------------------------------------ a socket's keys


def is_local(address: str) -> bool:
    """Whether `address` stays on this machine: loopback in numbers, localhost, ipc. No name is resolved."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return True
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def learner_security(transport: TransportConfig, bind: str) -> Secure | None:
    """The keys of the learner's socket; None = plain. ValueError, in one line: they are missing or open to others."""
    if not _wanted(transport, "learner.bind", bind):
        return None
    folder = Path(transport.keys)
    pair = _read_pair(folder / f"{LEARNER}.key")
    return ServerKeys(pair["public"].encode(), pair["secret"].encode(), AllowList(folder / ALLOWED, read_allowed))


def actor_security(transport: TransportConfig, learner: str) -> Secure | None:
    """The keys of an actor's socket; None = plain. ValueError as for the learner's."""
    if not _wanted(transport, "actor.learner", learner):
        return None
    path = Path(transport.keys) / f"{_checked_name(transport.key_name)}.key"
    pair = _read_pair(path)
    if LEARNER not in pair:
        raise ValueError(f"{path} names no learner's key: it is not an actor's key file; {_MAKE}")
    return ClientKeys(pair["public"].encode(), pair["secret"].encode(), pair[LEARNER].encode())


def _wanted(transport: TransportConfig, field: str, address: str) -> bool:
    if transport.keys:
        return True
    if is_local(address) or transport.allow_plain:
        return False
    raise ValueError(
        f"{field} = {address!r} is not loopback, and transport.keys is empty: {_MAKE} FOLDER and set "
        "--transport.keys FOLDER (or, on a network where everybody is trusted, --transport.allow_plain true)"
    )


def read_api_key(path: str, field: str = "engine.api_key_file") -> str:
    """The engines' API key in the file `path`, which `field` names; "" for an empty path. ValueError, in one line, for
    a file that is missing, open to others or without a key."""
    if not path:
        return ""
    key = _read(Path(path), forbidden=0o077, cure="chmod 600", field=field).strip()
    if not _API_KEY.fullmatch(key):
        raise ValueError(
            f"{field} = {path!r} holds no key: one line of 16 to 512 letters, digits or any of '._~+/=-'; "
            "make one with python -m shared.keys FOLDER --engine"
        )
    return key


# ------------------------------------------------------------------ files


def read_allowed(path: Path) -> dict[bytes, str]:
    """Public keys and their names, one `KEY NAME` a line. ValueError for a file others may write, or a bad line."""
    allowed: dict[bytes, str] = {}
    for number, line in enumerate(_read(path, forbidden=0o022, cure="chmod 644").splitlines(), 1):
        key, _, name = line.strip().partition(" ")
        if key and not (_KEY.fullmatch(key) and _NAME.fullmatch(name)):
            raise ValueError(f"{path}, line {number}: {line[:60]!r} is no public key and name; {_MAKE}")
        if key:
            allowed[key.encode()] = name
    if not allowed:
        raise ValueError(f"{path} names no actor: {_MAKE}")
    return allowed


def _read_pair(path: Path) -> dict[str, str]:
    text = _read(path, forbidden=0o077, cure="chmod 600")
    try:
        pair = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no key file: {error}; {_MAKE}") from None
    if not {"public", "secret"} <= pair.keys() <= {"public", "secret", LEARNER}:
        raise ValueError(f"{path} is no key file: it holds {', '.join(pair) or 'nothing'}; {_MAKE}")
    if not all(isinstance(value, str) and _KEY.fullmatch(value) for value in pair.values()):
        raise ValueError(f"{path} is no key file: a key is not of 40 characters; {_MAKE}")
    if zmq.curve_public(pair["secret"].encode()).decode() != pair["public"]:
        raise ValueError(f"{path} is damaged: its public key does not belong to its secret; {_MAKE}")
    return pair


def _read(path: Path, *, forbidden: int, cure: str, field: str = "transport.keys") -> str:
    try:
        with path.open(encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & forbidden:
                raise ValueError(f"{path} is open to others (mode {mode:04o}): {cure} {path}")
            return file.read(MAX_KEY_FILE_BYTES)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no key file; {_MAKE}") from None
    except OSError as error:
        raise ValueError(f"{field}: cannot read {path}: {error.strerror}; {_MAKE}") from None


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name in (LEARNER, ALLOWED, ENGINE, ".", ".."):
        raise ValueError(f"the name {name!r} of a key: use up to 64 letters, digits, '_', '.', '-'")
    return name


def make_keys(folder: Path, actors: Sequence[str]) -> list[Path]:
    """Makes the missing ones of the learner's pair, the actors' pairs and the allow-list; returns the new files."""
    names = [_checked_name(name) for name in actors]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    learner = folder / f"{LEARNER}.key"
    made = [] if learner.exists() else [learner]
    server = _write_pair(learner) if made else _read_pair(learner)["public"]
    for name in names:
        path = folder / f"{name}.key"
        if path.exists():
            continue
        public = _write_pair(path, **{LEARNER: server})
        made.append(path)
        with os.fdopen(os.open(folder / ALLOWED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.write(f"{public} {name}\n")
    return made


def make_api_key(folder: Path) -> list[Path]:
    """Makes the engines' API key if it is missing; returns the new file."""
    path = folder / f"{ENGINE}.key"
    if path.exists():
        return []
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_secret(path, secrets.token_urlsafe(32) + "\n")
    return [path]


def _write_pair(path: Path, **more: str) -> str:
    """The public key of the pair that now is in `path`."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys = {"public": public, "secret": secret, **more}
    write_secret(path, "".join(f'{name} = "{value}"\n' for name, value in keys.items()))
    return public


def write_secret(path: Path, text: str, *, anew: bool = False) -> None:
    """Creates the file with mode 0600; `anew` replaces an existing one, else FileExistsError."""
    if anew:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shared.keys", description="keys of learner and actors")
    parser.add_argument("folder", nargs="?", default="keys", help="where the files go (default: keys)")
    parser.add_argument("--actors", nargs="+", default=["actor"], help="names of actors' keys (default: actor)")
    parser.add_argument("--engine", action="store_true", help="also make the engines' API key")
    arguments = parser.parse_args(argv)
    folder = Path(arguments.folder)
    try:
        made = make_keys(folder, arguments.actors) + (make_api_key(folder) if arguments.engine else [])
    except (ValueError, OSError) as error:
        return fail(error)
    print(f"made {', '.join(map(str, made))}" if made else "nothing to make: all of these exist")
    kept = f"{folder / 'learner.key'} and {folder / ALLOWED}"
    print(f"{kept} stay with the learner; an actor needs its own .key file only")
    return 0


if __name__ == "__main__":
    sys.exit(main())
