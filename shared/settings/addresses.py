"""Addresses of the learner's socket, as a recipe has them."""

from __future__ import annotations

import re

_HOST = r"(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+)"  # of IPv6 in brackets; * and names of interfaces too
_TCP = re.compile(rf"tcp://{_HOST}:(\*|[0-9]{{1,5}})")
_EVERY_HOST = ("*", "0.0.0.0", "::")  # binds to each address of its machine
_IPC = re.compile(r"ipc://.+")


def checked_address(field: str, address: str) -> str:
    """The address; ValueError if it has neither the form of TCP nor that of a socket in the file system, or names a
    port that nobody can call."""
    tcp = _TCP.fullmatch(address)
    if not tcp and not _IPC.fullmatch(address):
        raise ValueError(f"{field} = {address!r} is no address: write it as tcp://HOST:PORT, or ipc://PATH")
    if tcp and tcp[3] != "*" and int(tcp[3]) > 65535:
        raise ValueError(f"{field} = {address!r}: there is no port {tcp[3]}; give one up to 65535")
    if tcp and tcp[3] != "*" and int(tcp[3]) == 0:
        raise ValueError(f"{field} = {address!r}: nobody can call port 0; give one from 1 to 65535")
    return address


def port_beside(bind: str, host: str) -> int:
    """The port that a learner bound to `bind` takes from engines on `host`; 0 = none. Where it is bound to each address
    of its machine, only engines on loopback are known to be there too."""
    tcp = _TCP.fullmatch(bind)
    if not tcp or tcp[3] == "*":
        return 0
    bound, own = ("127.0.0.1" if each == "localhost" else each.strip("[]") for each in (tcp[1], host))
    beside = bound in _EVERY_HOST and (own == "::1" or own.startswith("127."))
    return int(tcp[3]) if beside or bound == own else 0
