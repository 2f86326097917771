"""The addresses of the ZeroMQ transports: over TCP, and over sockets in the file system. The module with the sockets is
imported when the first one is opened."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from shared.wire.endpoints import ActorKeys, EndpointSettings, LearnerKeys, Transport

if TYPE_CHECKING:
    from shared.wire.zeromq import Dealer, Router

_HOST = r"(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+)"  # IPv6 in brackets; * and names of interfaces too
_TCP = re.compile(rf"tcp://{_HOST}:(\*|[0-9]{{1,5}})")
_EVERY_HOST = ("*", "0.0.0.0", "::")  # binds to each address of its machine
_IPC = re.compile(r"ipc://.+")


class _ZeroMQ(Transport):
    def listen(self, address: str, settings: EndpointSettings, keys: LearnerKeys | None) -> Router:
        from shared.wire.zeromq import Router

        return Router(address, settings, keys)

    def connect(self, address: str, name: str, settings: EndpointSettings, keys: ActorKeys | None) -> Dealer:
        from shared.wire.zeromq import Dealer

        return Dealer(address, name, settings, keys)


class Tcp(_ZeroMQ):
    """ZeroMQ over TCP, with CURVE where keys are given."""

    form = "tcp://HOST:PORT"

    def check_address(self, field: str, address: str) -> None:
        """Raise ValueError for an address of another form, or with a port that nobody can call."""
        match = _TCP.fullmatch(address)
        if not match:
            raise ValueError(f"{field} = {address!r} is no address: write it as {self.form}")
        port = match[3]
        if port != "*" and int(port) > 65535:
            raise ValueError(f"{field} = {address!r}: there is no port {port}; give one up to 65535")
        if port != "*" and int(port) == 0:
            raise ValueError(f"{field} = {address!r}: nobody can call port 0; give one from 1 to 65535")

    def is_local(self, address: str) -> bool:
        """Tell whether the host is a numeric loopback address, or localhost."""
        host = address.partition("://")[2].rpartition(":")[0].strip("[]")
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def taken_port(self, bind: str, host: str) -> int:
        """Return the port of `bind` if servers on `host` cannot use it; 0 otherwise. A learner bound to every address
        of its machine only surely shares that machine with servers on loopback addresses."""
        match = _TCP.fullmatch(bind)
        if not match or match[3] == "*":
            return 0
        bound, server = ("127.0.0.1" if each == "localhost" else each.strip("[]") for each in (match[1], host))
        is_beside = bound in _EVERY_HOST and (server == "::1" or server.startswith("127."))
        return int(match[3]) if is_beside or bound == server else 0


class Ipc(_ZeroMQ):
    """ZeroMQ over a socket in the file system."""

    form = "ipc://PATH"

    def check_address(self, field: str, address: str) -> None:
        """Raise ValueError for an address without a path."""
        if not _IPC.fullmatch(address):
            raise ValueError(f"{field} = {address!r} is no address: write it as {self.form}")

    def is_local(self, address: str) -> bool:
        return True
