"""Key files of the encrypted sockets, made by `python -m shared.keys`.

    python -m shared.keys keys --actors farm-a farm-b
    python -m shared.keys keys --engine            # also the engines' API key, keys/engine.key

`keys/learner.key` and `keys/allowed` stay with the learner; only `keys/farm-a.key` goes to that actor's host. A second
call adds actors and keeps the existing files. Files with secrets are readable by their owner alone (0600).
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from shared.config.recipe import fail
from shared.config.reward_section import JudgeConfig
from shared.config.sections import RolloutConfig, TransportConfig
from shared.util.own_commands import called_as
from shared.wire.auth import make_key_pair, public_key_of
from shared.wire.endpoints import ActorKeys, AllowList, HalfWritten, LearnerKeys
from shared.wire.transports import transport_of

LEARNER, ALLOWED, ENGINE = "learner", "allowed", "engine"
MAX_KEY_FILE_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(r"[!-~]{40}")  # Z85, whose alphabet needs no quoting in TOML
_API_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")  # characters that RFC 6750 allows in a bearer token
_MAKE = "make keys with python -m shared.keys"


# ------------------------------------------------------------------ an endpoint's keys


def is_local(address: str) -> bool:
    """Tell whether `address` stays on this machine: a numeric loopback address, localhost or ipc. No name is
    resolved."""
    return transport_of("address", address).is_local(address)


def learner_keys(transport: TransportConfig, bind: str) -> LearnerKeys | None:
    """Return the keys of the learner's endpoint; None = no encryption. Raise ValueError, in one line, for key files
    that are missing or open to others."""
    if not _needs_keys(transport, "learner.bind", bind):
        return None
    folder = Path(transport.keys)
    pair = _read_pair(folder / f"{LEARNER}.key")
    return LearnerKeys(pair["public"].encode(), pair["secret"].encode(), AllowList(folder / ALLOWED, read_allowed))


def actor_keys(transport: TransportConfig, learner: str) -> ActorKeys | None:
    """Return the keys of an actor's endpoint; None = no encryption. Raise ValueError as `learner_keys` does."""
    if not _needs_keys(transport, "actor.learner", learner):
        return None
    path = Path(transport.keys) / f"{_checked_name(transport.key_name)}.key"
    pair = _read_pair(path)
    if LEARNER not in pair:
        raise ValueError(f"{path} names no learner's key: it is not an actor's key file; {_MAKE}")
    return ActorKeys(pair["public"].encode(), pair["secret"].encode(), pair[LEARNER].encode())


def _needs_keys(transport: TransportConfig, field: str, address: str) -> bool:
    if transport.keys:
        return True
    if is_local(address) or transport.allow_plain:
        return False
    raise ValueError(
        f"{field} = {address!r} is not loopback, and transport.keys is empty: {_MAKE} FOLDER and set "
        "--transport.keys FOLDER (or, on a network where everybody is trusted, --transport.allow_plain true)"
    )


def read_api_key(path: str, field: str = "engine.api_key_file") -> str:
    """Return the engines' API key in the file `path`, which `field` names; "" for an empty path. Raise ValueError, in
    one line, for a file that is missing, open to others or without a key."""
    if not path:
        return ""
    key = _read(Path(path), forbidden=0o077, cure="chmod 600", field=field).strip()
    if not _API_KEY.fullmatch(key):
        raise ValueError(
            f"{field} = {path!r} holds no key: one line of 16 to 512 letters, digits or any of '._~+/=-'; "
            "make one with python -m shared.keys FOLDER --engine"
        )
    return key


def agents_key(rollout: RolloutConfig) -> str:
    """Return the key that agents elsewhere send; "" for none. Raise ValueError, in one line, if it cannot be read, or
    is missing although they may call from other machines."""
    key = read_api_key(rollout.api_key_file, "rollout.api_key_file")
    if rollout.listen and not key and not is_local(f"tcp://{rollout.listen}"):
        raise ValueError(
            f"rollout.listen = {rollout.listen!r} is not loopback, and there is no key: make one with python -m "
            "shared.keys FOLDER --engine, and set --rollout.api_key_file FOLDER/engine.key"
        )
    return key


def judge_key(judge: JudgeConfig) -> str:
    """Return the API key of a judge's server; "" for none. Raise ValueError, in one line, if it cannot be read."""
    if judge.api_key_env:
        if key := os.environ.get(judge.api_key_env, "").strip():
            return key
        raise ValueError(f"reward.judge.api_key_env = {judge.api_key_env!r}: there is no such environment variable")
    return read_api_key(judge.api_key_file, "reward.judge.api_key_file")


# ------------------------------------------------------------------ files


def read_allowed(path: Path) -> dict[bytes, str]:
    """Read public keys and their names, one `KEY NAME` a line. Raise HalfWritten for a bad line, ValueError for a file
    that is missing, names nobody, or may be written by others."""
    allowed: dict[bytes, str] = {}
    for number, line in enumerate(_read(path, forbidden=0o022, cure="chmod 644").splitlines(), 1):
        key, _, name = line.strip().partition(" ")
        if key and not (_KEY.fullmatch(key) and _NAME.fullmatch(name)):
            raise HalfWritten(f"{path}, line {number}: {line[:60]!r} is no public key and name; {_MAKE}")
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
    if public_key_of(pair["secret"]) != pair["public"]:
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
        raise HalfWritten(f"{path} is no key file; {_MAKE}") from None
    except OSError as error:
        raise ValueError(f"{field}: cannot read {path}: {error.strerror}; {_MAKE}") from None


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name in (LEARNER, ALLOWED, ENGINE, ".", ".."):
        raise ValueError(f"the name {name!r} of a key: use up to 64 letters, digits, '_', '.', '-'")
    return name


def make_keys(folder: Path, actors: Sequence[str]) -> list[Path]:
    """Make those of the learner's pair, the actors' pairs and the allow-list that are missing; return the new key
    files."""
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
    """Make the engines' API key if it is missing; return the new file."""
    path = folder / f"{ENGINE}.key"
    if path.exists():
        return []
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_secret(path, secrets.token_urlsafe(32) + "\n")
    return [path]


def _write_pair(path: Path, **more: str) -> str:
    """Write a new pair to `path`; return its public key."""
    public, secret = make_key_pair()
    keys = {"public": public, "secret": secret, **more}
    write_secret(path, "".join(f'{name} = "{value}"\n' for name, value in keys.items()))
    return public


def write_secret(path: Path, text: str, *, anew: bool = False) -> None:
    """Create the file with mode 0600. With `anew` replace an existing file; without it raise FileExistsError if there
    is one."""
    if anew:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=called_as("python -m shared.keys"), description="keys of learner and actors")
    parser.add_argument("folder", nargs="?", default="keys", help="where the files go (default: keys)")
    parser.add_argument("--actors", nargs="+", default=["actor"], help="names of actors' keys (default: actor)")
    parser.add_argument("--engine", action="store_true", help="also make the engines' API key")
    arguments = parser.parse_args(argv)
    folder = Path(arguments.folder)
    try:
        made = make_keys(folder, arguments.actors) + (make_api_key(folder) if arguments.engine else [])
    except OSError as error:
        return fail(ValueError(f"no keys can be made in {str(folder)!r} ({error.strerror}): name a folder of your own"))
    except ValueError as error:
        return fail(error)
    print(f"made {', '.join(map(str, made))}" if made else "nothing to make: all of these exist")
    secret = f"{folder / 'learner.key'} and {folder / ALLOWED}"
    print(f"{secret} stay with the learner; an actor needs its own .key file only")
    return 0


if __name__ == "__main__":
    sys.exit(main())
