"""The addresses of this host's engines, and checks that the learner, which sends them weights, can reach them."""

from __future__ import annotations

import ipaddress
import random
import socket
from pathlib import Path
from urllib.parse import urlsplit

from shared.config.recipe import ConfigError, Recipe
from shared.keys import is_local

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # ports that the kernel assigns to sockets that ask for any


def check_reach(recipe: Recipe) -> None:
    """Raise ConfigError for engines off loopback without an API key, for a wildcard address, and for engines on
    loopback while the learner is on another host."""
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
    """Raise ConfigError for an address off loopback without an API key."""
    if not api_key and not is_local(f"tcp://{host}:0"):
        raise ConfigError(
            f"engine.host = {host!r} is not loopback; set engine.api_key_file (python -m shared.keys keys --engine "
            "makes one)"
        )


def check_ports(recipe: Recipe) -> None:
    """Raise ConfigError for an occupied port, and for an address that is not this machine's."""
    engine = recipe.engine
    try:
        is_ours = _is_mine(engine.host)
    except (socket.gaierror, UnicodeError):
        is_ours = False
    if not is_ours:
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
    """Return the first of `in_a_row` consecutive free ports on loopback. They are outside of the range from which the
    kernel assigns ports to sockets that ask for any (as torchrun's and gloo's do), so that none is taken before it is
    used. Raise OSError if there are none."""
    chance = random.SystemRandom()  # independent of seeds, so that two processes choose differently
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
    """Tell whether a name belongs to another host. False for a name that cannot be resolved: connecting will report
    that."""
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
