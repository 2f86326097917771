"""What the kernel tells of a connection, and whose it stays."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from shared.wire.kernel_sockets import KernelSocket


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with closing(near), closing(far):
            yield near, far


def test_the_bytes_that_a_connection_brings_are_counted_before_they_are_read(ends) -> None:
    near, far = ends
    kernel_socket = KernelSocket(near.fileno())
    far.sendall(b"x" * 1000)
    near.recv(1, socket.MSG_PEEK)
    assert kernel_socket.bytes_received() == 1000
    assert kernel_socket.peer == far.getsockname()


def test_a_socket_that_nobody_looks_at_any_more_stays_open(ends) -> None:
    near, far = ends
    kernel_socket = KernelSocket(near.fileno())
    del kernel_socket
    far.sendall(b"still here")
    assert near.recv(10) == b"still here"


def test_a_connection_that_was_shut_is_at_its_end_for_both(ends) -> None:
    near, far = ends
    KernelSocket(near.fileno()).shut()
    assert near.recv(1) == far.recv(1) == b""


def test_a_descriptor_that_is_another_connections_by_now_is_neither_counted_nor_shut(ends) -> None:
    near, far = ends
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        gone = socket.create_connection(server.getsockname())
        kernel_socket = KernelSocket(gone.fileno())
        os.dup2(near.fileno(), gone.fileno())  # as if it had been closed, and its number given away
        with closing(gone):
            assert not kernel_socket.is_open
            assert kernel_socket.bytes_received() is None
            kernel_socket.shut()
            far.sendall(b"still here")
            assert gone.recv(10) == b"still here"


def test_what_is_closed_or_no_socket_is_refused_or_gone(ends) -> None:
    near, _ = ends
    kernel_socket = KernelSocket(near.fileno())
    near.close()
    assert kernel_socket.bytes_received() is None
    with open(os.devnull) as file, pytest.raises(OSError):
        KernelSocket(file.fileno())
