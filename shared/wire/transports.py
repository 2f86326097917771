"""The transports by the scheme of their addresses. To add one, write a class like those of
`shared.wire.zeromq_addresses` and enter it in `TRANSPORTS`."""

from __future__ import annotations

from shared.wire.endpoints import (
    DEFAULT_SETTINGS,
    ActorEndpoint,
    ActorKeys,
    EndpointSettings,
    LearnerEndpoint,
    LearnerKeys,
    Transport,
)
from shared.wire.zeromq_addresses import Ipc, Tcp

TRANSPORTS: dict[str, Transport] = {"tcp": Tcp(), "ipc": Ipc()}


def transport_of(field: str, address: str) -> Transport:
    """Return the transport of an address. Raise ValueError, in one line, for a scheme that is not registered."""
    scheme, separator, _ = address.partition("://")
    if scheme in TRANSPORTS and separator:
        return TRANSPORTS[scheme]
    forms = ", or ".join(transport.form for transport in TRANSPORTS.values())
    raise ValueError(
        f"{field} = {address!r} is no address: write it as {forms} (shared/wire/transports.py registers the schemes)"
    )


def checked_address(field: str, address: str) -> str:
    """Return the address. Raise ValueError unless a learner can listen there and actors can call it."""
    transport_of(field, address).check_address(field, address)
    return address


def listen(
    address: str, settings: EndpointSettings = DEFAULT_SETTINGS, keys: LearnerKeys | None = None
) -> LearnerEndpoint:
    """Open the learner's end at `address`. Raise ValueError, in one line, if the address cannot be used."""
    return transport_of("learner.bind", address).listen(address, settings, keys)


def connect(
    address: str, name: str, settings: EndpointSettings = DEFAULT_SETTINGS, keys: ActorKeys | None = None
) -> ActorEndpoint:
    """Open an actor's end; `name` is the actor's. Raise ValueError, in one line, for an address that cannot be used."""
    return transport_of("actor.learner", address).connect(address, name, settings, keys)
