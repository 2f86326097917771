"""A plugin of SGLang's server (its entry point group `sglang.srt.plugins`): nobody waits for a learner that has gone.

The group that weights travel over has torch's default limit, half an hour with gloo, and the generating thread waits
in it. A learner that gives up a broadcast, such as when another engine has refused it, breaks the connections; but gloo
forgets who receives a message that breaks off in the middle, so that the server would stand still until the limit.
Requests to join groups that are given up by then would stand still after it, one after the other.

Here a group of gloo's has the learner's own limit, PRONK_GROUP_TIMEOUT_S. Weights are received on another thread, while
this one looks once a second whether the learner still has the group's store open; a group without one is not joined.

A learner that is killed says nothing of its groups. One learner publishes to a server, over one group at a time: it
gives a group up before it builds another, and never uses it again. So whoever joins leaves all earlier groups.

NCCL's groups have their own limits: it notices broken connections, and torch ends a process whose limit has passed.

Goes when gloo tells the receiver of a message that breaks off, and SGLang takes a limit and leaves such groups.
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

LOOK_S = 1.0
"""Between two looks at the store, and for one that is not answered."""

Address = tuple[str, int]


def given_up(store: Address) -> bool:
    """Whether the learner's host answers that nobody listens there any more. Silence says nothing."""
    try:
        socket.create_connection(store, LOOK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def stream_of(updater: Any) -> Any:
    """What the calling thread has the GPU do is in this stream; None without a GPU."""
    import torch

    return torch.cuda.current_stream(updater.gpu_id) if updater.device == "cuda" else None


@contextmanager
def in_stream(stream: Any) -> Any:
    """A new thread is at GPU 0 and in its default stream; within this it is where another one is.

    Gloo copies what it receives to the GPU in a stream of its own, and only the stream of the thread that waits for the
    broadcast waits for the copy. At the end of this the bytes are there, for every thread and stream."""
    import torch

    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


def break_up(group: Any) -> None:
    """On another thread, for it may wait for the network. SGLang's way, to destroy the group, would have NCCL wait for
    all the others that are in it."""
    from torch.distributed.distributed_c10d import _abort_process_group

    threading.Thread(target=_abort_process_group, args=(group,), name="earlier weights", daemon=True).start()


class Hooks:
    """Stand around methods of the server's WeightUpdater, in each model process."""

    def __init__(self) -> None:
        self.stores: dict[str, Address] = {}  # of gloo's groups, by their names

    def join(
        self,
        original: Any,
        updater: Any,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
    ) -> tuple[bool, str]:
        store = (master_address, master_port)
        if given_up(store):
            return False, f"the learner has given up the group {group_name!r}"
        earlier = updater._model_update_group.keys() - {group_name}
        joined, why = original(updater, master_address, master_port, rank_offset, world_size, group_name, backend)
        if joined:
            if backend == "gloo":
                self.stores[group_name] = store
            for name in earlier:
                self.stores.pop(name, None)
                break_up(updater._model_update_group.pop(name))
        return joined, why

    def leave(self, original: Any, updater: Any, group_name: str) -> tuple[bool, str]:
        self.stores.pop(group_name, None)
        return original(updater, group_name)

    def receive(self, original: Any, updater: Any, *, group_name: str, **bucket: Any) -> Any:
        """RuntimeError where the learner has given up the group."""
        store = self.stores.get(group_name)
        if store is None:
            return original(updater, group_name=group_name, **bucket)
        received: Future[Any] = Future()
        stream = stream_of(updater)

        def run() -> None:
            try:
                with in_stream(stream):
                    weights = original(updater, group_name=group_name, **bucket)
                received.set_result(weights)
            except BaseException as error:  # noqa: BLE001  raised where the bucket is wanted
                received.set_exception(error)

        threading.Thread(target=run, name="weights", daemon=True).start()
        while True:
            try:
                return received.result(LOOK_S)
            except TimeoutError:
                if received.done():
                    raise
                if given_up(store):
                    raise RuntimeError(f"the learner has given up the group {group_name!r}") from None


def limited(original: Any, *, backend: str, **fields: Any) -> Any:
    """Stands around SGLang's constructor of groups."""
    if backend == "gloo":
        fields["timeout"] = timedelta(seconds=float(os.environ.get("PRONK_GROUP_TIMEOUT_S", "300")))
    return original(backend=backend, **fields)


def register() -> None:
    """Called by SGLang in each of its processes, before it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks, module = Hooks(), "sglang.srt.model_executor.model_runner_components.weight_updater"
    HookRegistry.register(f"{module}.init_custom_process_group", limited, HookType.AROUND)
    HookRegistry.register(f"{module}.WeightUpdater.init_weights_update_group", hooks.join, HookType.AROUND)
    HookRegistry.register(f"{module}.WeightUpdater.destroy_weights_update_group", hooks.leave, HookType.AROUND)
    HookRegistry.register(f"{module}.WeightUpdater.receive_weights_from_distributed", hooks.receive, HookType.AROUND)
