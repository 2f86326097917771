"""A plugin of SGLang's server (its entry point group `sglang.srt.plugins`): the server does not wait for a learner that
is gone.

The group over which weights are sent has torch's default time limit of half an hour, and the generating thread waits in
it. When a learner gives up a broadcast, for example because another engine has refused it, it breaks the connections.
But gloo does not notify the receiver of a message that breaks off in the middle, and a kernel of NCCL's ends only when
its own process aborts it. So the server would stand still until the limit; then the requests to join groups that have
been given up meanwhile would wait, one after the other.

With this plugin a group has the learner's own limit, PRONK_GROUP_TIMEOUT_S. Groups are joined and weights received on
another thread, while this one checks once a second whether the learner still has the group's store open; if not, it
aborts the group here. A group without an open store is not joined. NCCL connects at the first broadcast: that is of
eight bytes, and part of joining. A group is left by aborting it, since to destroy it is to wait for its kernels.

A killed learner does not close its groups. But one learner publishes to a server, over one group at a time: it gives up
its group before it builds another. So the server leaves all earlier groups when it joins a new one.

A group of NCCL is made with TORCH_NCCL_BLOCKING_WAIT: without it torch's watchdog ends the process a minute after a
broadcast has been aborted.

To be removed when gloo notifies the receiver of a message that breaks off, and SGLang accepts a limit and leaves such
groups.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

LOOK_S = 1.0
"""Between two looks at the store, and for one that is not answered."""

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Torch reads it when a group is made."""

Address = tuple[str, int]


def given_up(store: Address) -> bool:
    """Tell whether the learner's host refuses the connection, so that nobody listens there any more. No answer does not
    count."""
    try:
        socket.create_connection(store, LOOK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def stream_of(updater: Any) -> Any:
    """Return the calling thread's current CUDA stream; None without a GPU."""
    import torch

    return torch.cuda.current_stream(updater.gpu_id) if updater.device == "cuda" else None


@contextmanager
def in_stream(stream: Any) -> Any:
    """Give the calling thread another thread's GPU and stream; a new thread has GPU 0 and its default stream. Gloo
    copies received data to the GPU in a separate stream, and only the stream of the thread that waits for the broadcast
    waits for this copy. So this synchronizes at the end: then the data is there for every thread and stream."""
    import torch

    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


def break_up(group: Any) -> None:
    """Abort the group on another thread, since that may wait for the network. SGLang would destroy the group, for which
    NCCL waits for all other members."""
    from torch.distributed.distributed_c10d import _abort_process_group

    threading.Thread(target=_abort_process_group, args=(group,), name="earlier weights", daemon=True).start()


class GroupHooks:
    """Hooks around methods of the server's WeightUpdater, in each model process."""

    def __init__(self) -> None:
        self.stores: dict[str, Address] = {}  # store addresses of groups, by their names

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

        def join() -> tuple[bool, str]:
            done = original(updater, master_address, master_port, rank_offset, world_size, group_name, backend)
            if done[0] and backend == "nccl":
                first_broadcast(updater, group_name)
            return done

        try:
            joined, why = self._while_there(store, updater, group_name, join)
        except RuntimeError as error:
            return False, str(error)
        if joined:
            self.stores[group_name] = store
            for name in earlier:
                self._drop(updater, name)
        return joined, why

    def leave(self, _original: Any, updater: Any, group_name: str) -> tuple[bool, str]:
        if self._drop(updater, group_name):
            return True, "Succeeded to leave the group."
        return False, "The group to be destroyed does not exist."

    def _drop(self, updater: Any, group_name: str) -> bool:
        """Forget and abort a group; return False if there is none."""
        self.stores.pop(group_name, None)
        group = updater._model_update_group.pop(group_name, None)
        if group is not None:
            break_up(group)
        return group is not None

    def receive(self, original: Any, updater: Any, *, group_name: str, **bucket: Any) -> Any:
        """Receive a bucket. Raise RuntimeError if the learner has given up the group."""
        store = self.stores.get(group_name)
        if store is None:
            return original(updater, group_name=group_name, **bucket)
        return self._while_there(store, updater, group_name, lambda: original(updater, group_name=group_name, **bucket))

    def _while_there(self, store: Address, updater: Any, group_name: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call on another thread. If the learner gives up the group meanwhile, abort it and
        raise RuntimeError."""
        result: Future[Any] = Future()
        stream = stream_of(updater)

        def run() -> None:
            try:
                with in_stream(stream):
                    returned = call()
                result.set_result(returned)
            except BaseException as error:  # noqa: BLE001  raised in the waiting thread
                result.set_exception(error)

        threading.Thread(target=run, name="weights", daemon=True).start()
        while True:
            try:
                return result.result(LOOK_S)
            except TimeoutError:
                if result.done():
                    raise
                if given_up(store):
                    self._drop(updater, group_name)
                    raise RuntimeError(f"the learner has given up the group {group_name!r}") from None


def first_broadcast(updater: Any, group_name: str) -> None:
    """Receive the eight bytes with which a group of NCCL connects its members."""
    import torch

    first = torch.zeros(8, dtype=torch.uint8, device=updater.device)
    torch.distributed.broadcast(first, src=0, group=updater._model_update_group[group_name])


def limited(original: Any, *, backend: str, **fields: Any) -> Any:
    """Wrap SGLang's constructor of groups: set their time limit, and have NCCL's be without a watchdog."""
    fields["timeout"] = timedelta(seconds=float(os.environ.get("PRONK_GROUP_TIMEOUT_S", "300")))
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        return original(backend=backend, **fields)
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


def register() -> None:
    """Register the hooks. SGLang calls this in each of its processes, before it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks, module = GroupHooks(), "sglang.srt.model_executor.model_runner_components.weight_updater"
    HookRegistry.register(f"{module}.init_custom_process_group", limited, HookType.AROUND)
    HookRegistry.register(f"{module}.WeightUpdater.init_weights_update_group", hooks.join, HookType.AROUND)
    HookRegistry.register(f"{module}.WeightUpdater.destroy_weights_update_group", hooks.leave, HookType.AROUND)
    HookRegistry.register(f"{module}.WeightUpdater.receive_weights_from_distributed", hooks.receive, HookType.AROUND)
