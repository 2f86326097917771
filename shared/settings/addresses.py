"""Addresses of the learner's socket, as a recipe has them."""

from __future__ import annotations

import re

_HOST = r"(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+)"  # of IPv6 in brackets; * and names of interfaces too
_TCP = re.compile(rf"tcp://{_HOST}:(\*|[0-9]{{1,5}})")
_IPC = re.compile(r"ipc://.+")


def checked_address(field: str, address: str) -> str:
    """The address; ValueError if it has neither the form of TCP nor that of a socket in the file system."""
    tcp = _TCP.fullmatch(address)
    if not tcp and not _IPC.fullmatch(address):
        raise ValueError(f"{field} = {address!r} is no address: write it as tcp://HOST:PORT, or ipc://PATH")
    if tcp and tcp[3] != "*" and int(tcp[3]) > 65535:
        raise ValueError(f"{field} = {address!r}: there is no port {tcp[3]}; give one up to 65535")
    return address
