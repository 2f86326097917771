"""TCP connections between two processes of this machine, cut or silenced from outside. For Linux, and for processes
that this one may trace: its own descendants, or any of them as root.

A silenced connection loses all that arrives at one of its ends, as behind a firewall that has forgotten it; what was
sent meanwhile comes when it is released, as TCP sends it again.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ESTABLISHED = "01"
MAPPED = "0000000000000000FFFF0000"  # an IPv4 address in a table of IPv6
PIDFD_GETFD = 438
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # of each packet nothing is kept

_libc = ctypes.CDLL(None, use_errno=True)


class Line(NamedTuple):
    """One end of a connection."""

    pid: int
    fd: int
    inode: str


def between(one: int, other: int) -> list[Line]:
    """The ends at process `one` of all connections between two processes; none if one of them has ended."""
    here, there = _ends(one), set(_ends(other))
    return [line for (own, far), line in here.items() if (far, own) in there]


def trouble(pid: int) -> str:
    """Why a process's descriptors cannot be had; empty if they can."""
    try:
        os.close(_copy(pid, 0))
    except (OSError, AttributeError) as error:  # no Linux
        return f"{type(error).__name__}: {error}"
    return ""


def cut(lines: Iterable[Line]) -> int:
    """Both ends read that the connection is closed. How many there were."""
    return _at(lines, lambda end: end.shutdown(socket.SHUT_RDWR))


def silence(lines: Iterable[Line]) -> int:
    program = ctypes.create_string_buffer(DROP)
    drop = struct.pack("HP", 1, ctypes.addressof(program))
    return _at(lines, lambda end: end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, drop))


def release(lines: Iterable[Line]) -> int:
    return _at(lines, lambda end: end.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0))


def _at(lines: Iterable[Line], do: Callable[[socket.socket], object]) -> int:
    """At each end that is still there, through a descriptor of our own for the moment: that keeps a connection open."""
    num_done = 0
    for line in lines:
        with suppress(OSError), socket.socket(fileno=_copy(line.pid, line.fd)) as end:
            if os.readlink(f"/proc/self/fd/{end.fileno()}") == f"socket:[{line.inode}]":  # else it is another one now
                do(end)
                num_done += 1
    return num_done


def _copy(pid: int, fd: int) -> int:
    process = os.pidfd_open(pid)
    try:
        copy: int = _libc.syscall(PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if copy < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return copy


def _ends(pid: int) -> dict[tuple[str, str], Line]:
    """(own address, the other's) of each established connection of a process."""
    fds: dict[str, int] = {}
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                fds[os.readlink(entry).removeprefix("socket:[").removesuffix("]")] = int(entry.name)
    found = {}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            own, far, state = fields[1:4]
            if state == ESTABLISHED and fields[9] in fds:
                found[own.removeprefix(MAPPED), far.removeprefix(MAPPED)] = Line(pid, fds[fields[9]], fields[9])
    return found
