"""Where the engines of this host listen, and whether the learner, which sends them weights, can reach them there."""

from __future__ import annotations

import ipaddress
import random
import socket
from pathlib import Path
from urllib.parse import urlsplit

from shared.config import ConfigError, Recipe
from shared.keys import is_local

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # what the kernel gives to whoever asks for any port


def check_reach(recipe: Recipe) -> None:
    """ConfigError for engines off loopback without an API key, on an address that names no host, or on loopback while
    the learner is on another host."""
    host, learner = recipe.engine.host, recipe.actor.learner
    if not is_local(f"tcp://{host}:0"):
        check_key(host, recipe.engine.api_key_file)
        if _is_any(host):
            raise ConfigError(f"engine.host = {host!r}: name the address by which the learner reaches this host")
    elif not is_local(learner) and _is_elsewhere(urlsplit(learner).hostname or ""):
        raise ConfigError(
            f"actor.learner = {learner!r} is another host, which cannot reach engines on engine.host = {host!r}: set "
            "engine.host to this host's address in their network, engine.urls to engines that run elsewhere, or "
            "engine.count to 0 for those that the learner names"
        )


def check_key(host: str, api_key: str) -> None:
    """ConfigError for an address off loopback without an API key."""
    if not api_key and not is_local(f"tcp://{host}:0"):
        raise ConfigError(
            f"engine.host = {host!r} is not loopback; set engine.api_key_file (python -m shared.keys keys --engine "
            "makes one)"
        )


def check_ports(recipe: Recipe) -> None:
    """ConfigError for a port that is taken, and for an address that is not this machine's."""
    engine = recipe.engine
    try:
        mine = _is_mine(engine.host)
    except (socket.gaierror, UnicodeError):
        mine = False
    if not mine:
        raise ConfigError(f"engine.host = {engine.host!r} is no address of this machine")
    for port in range(engine.port, engine.port + engine.count):
        try:
            family, *_, address = socket.getaddrinfo(engine.host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except (OSError, OverflowError):
            raise ConfigError(
                f"engine.port = {engine.port}: port {port} is occupied; choose another one (--engine.port)"
            ) from None


def free_port(in_a_row: int = 1) -> int:
    """The first of this many ports of loopback that nobody listens on. The kernel gives none of them to a socket that
    asks for any, as those of torchrun and gloo do, before the port is used. OSError if there are none."""
    chance = random.SystemRandom()  # no seed of a run makes two processes choose alike
    below = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32768
    low, high = (10000, below - in_a_row) if below > 11000 else (10000, 65536 - in_a_row)
    for first in (chance.randrange(low, high) for _ in range(1000)):
        if all(map(_is_free, range(first, first + in_a_row))):
            return first
    raise OSError(f"no {in_a_row} free ports in a row between {low} and {high + in_a_row}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_elsewhere(host: str) -> bool:
    """A name that cannot be resolved is nowhere: connecting will say so."""
    try:
        return not _is_mine(host)
    except (socket.gaierror, UnicodeError):
        return False


def _is_mine(host: str) -> bool:
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
