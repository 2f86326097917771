"""A plugin of SGLang's server (its entry point group `sglang.srt.plugins`): weights are received during generation.

SGLang receives weights on the thread that generates, so that generation stops for the whole transfer. With this plugin
a separate thread receives them into host memory, and `end_weight_update` installs all of them between two steps:

    begin_weight_update               forgets what an earlier update has left
    update_weights_from_distributed   answers at once; its broadcast is received in the background, one after the other
    end_weight_update                 waits for the last one, loads all, and says which version the weights are;
                                      with {"discard": true} it forgets what has come

An update is complete when its last bucket, the only one with a `weight_version`, has been announced. An update that is
incomplete or failed is discarded at its end, and the weights do not change. With tensor parallelism the ranks agree
first: all install, or all discard. No pause is needed, and no token is computed by a mixture of weights, since the
overlap scheduler's running forward is completed first.

This takes host memory: every tensor-parallel rank receives the whole weights, not its share, and keeps them until they
are loaded, so that a host holds one copy of the model per rank. With a GPU the copies are in pinned memory, which torch
keeps for the next update. An adapter sent without weights is small; it is merged when it is loaded
(`pronk_merged_adapters`). PRONK_STAGE_WEIGHTS=0 turns the plugin off.

To be removed when SGLang itself receives weights during generation.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any

FORGOTTEN = "none"  # name of weights that are no version of any run
DISCARD = "discard"  # id of a request to discard the update
LAST_BYTES_S = 20.0  # time for the last bytes when the update should be installed


class Staging:
    """The open update of one model process. One thread receives its buckets in the order of the requests."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.refused = ""  # why a bucket was refused, so that the update is incomplete
        self._futures: list[Future[Any]] = []
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="staged weights", daemon=True).start()

    def receive(self, updater: Any, request: Any) -> None:
        future: Future[Any] = Future()
        self.requests.append(request)
        self._futures.append(future)
        self._work.put((future, updater, request))

    def buckets(self) -> list[Any]:
        """Return all received buckets. Raise the error of a bucket that failed, or TimeoutError if bytes are
        missing."""
        deadline = time.monotonic() + LAST_BYTES_S
        return [future.result(max(0.0, deadline - time.monotonic())) for future in self._futures]

    @property
    def version(self) -> str | None:
        """The version of the whole update; None until its last bucket has been announced."""
        return self.requests[-1].weight_version if self.requests else None

    def close(self) -> None:
        """End the thread after the bucket that it is receiving."""
        for future in self._futures:
            future.cancel()
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, updater, request = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(received(updater, request))
                except BaseException as error:  # noqa: BLE001  raised by future.result()
                    future.set_exception(error)


def received(updater: Any, request: Any) -> list[tuple[str, Any]]:
    """Receive one bucket; return (name, values on the host) of its parameters."""
    with _beside_generation(updater):
        weights = updater.receive_weights_from_distributed(
            names=request.names,
            dtypes=request.dtypes,
            shapes=request.shapes,
            group_name=request.group_name,
            load_format=request.load_format,
        )
        return [(name, _on_host(values)) for name, values in weights]


@contextmanager
def _beside_generation(updater: Any) -> Any:
    """Receive on a GPU in a separate stream, so that generation goes on."""
    import torch

    if updater.device != "cuda":
        yield
        return
    stream = _stream_beside_generation(updater.gpu_id)
    with torch.cuda.device(updater.gpu_id), torch.cuda.stream(stream):
        yield
        stream.synchronize()


@cache
def _stream_beside_generation(gpu_id: int) -> Any:
    """Return one stream for all buckets: the allocator reuses memory only on the stream on which it was used."""
    import torch

    return torch.cuda.Stream(gpu_id)


def _on_host(values: Any) -> Any:
    import torch

    if values.device.type == "cpu":
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def to_load(staging: Staging | None, runner: Any) -> tuple[list[Any], str]:
    """Return (the buckets of the complete update, ""), or ([], why it cannot be installed)."""
    if staging is None:
        return [], "no update is open: call begin_weight_update first"
    if staging.refused:
        return [], f"a bucket was refused, and the update is forgotten: {staging.refused}"
    if staging.version is None:
        return [], "nothing to install: the weights did not all come; forgotten"
    try:
        from pronk_merged_adapters import merged_with_base

        return merged_with_base(staging.buckets(), runner), ""
    except Exception as error:  # noqa: BLE001  reported in the answer
        return [], f"the update failed and is forgotten: {error!r}"


class WeightHooks:
    """Hooks around the server's methods; `original` is the hooked method."""

    def __init__(self) -> None:
        from sglang.srt.managers.scheduler_components import weight_updater as module

        self.module = module
        self.staging: Staging | None = None
        self.begin_original = module.SchedulerWeightUpdaterManager.begin_weight_update
        self.end_original = module.SchedulerWeightUpdaterManager.end_weight_update

    # ------------------------------------------------------------------ in each model process

    def begin(self, _original: Any, manager: Any, request: Any) -> Any:
        self._forget()
        self.staging = Staging()
        return self.module.BeginWeightUpdateReqOutput(success=True, message="weights arrive beside generation")

    def update(self, _original: Any, manager: Any, request: Any) -> Any:
        output = self.module.UpdateWeightsFromDistributedReqOutput
        updater = manager.tp_worker.model_runner.weight_updater
        if self.staging is None:
            return output(success=False, message="no update is open: call begin_weight_update first")
        if request.group_name not in updater._model_update_group:
            self.staging.refused = f"there is no group {request.group_name!r}"
            return output(success=False, message=self.staging.refused)
        self.staging.receive(updater, request)
        return output(success=True, message="is being received")

    def end(self, _original: Any, manager: Any, request: Any) -> Any:
        from pronk_agreed_ranks import first_reason

        output = self.module.EndWeightUpdateReqOutput
        if request.rid == DISCARD:  # every rank gets the same request
            self._forget()
            return output(success=True, message="the update is forgotten")
        staging, self.staging = self.staging, None
        try:
            buckets, reason = to_load(staging, manager.tp_worker.model_runner)
            # Every rank must call this in every case: a rank that installed alone would wait for the others in SGLang's
            # barrier.
            reason = first_reason(manager.tp_cpu_group, reason)
            if reason or staging is None:
                return output(success=False, message=reason)
            success, message = self._install(manager, buckets, staging.requests[-1])
            return output(success=success, message=message)
        finally:
            if staging is not None:
                staging.close()

    def _install(self, manager: Any, buckets: list[Any], last: Any) -> tuple[bool, str]:
        from pronk_agreed_ranks import first_reason
        from pronk_drained_pauses import drain

        drain(manager.scheduler)
        begun = self.begin_original(manager, self.module.BeginWeightUpdateReqInput())
        if not begun.success:
            return False, begun.message
        success, message = True, f"the weights are version {last.weight_version}"
        with manager._observe_weight_load("distributed"):
            for weights in buckets:
                for _, runner in manager._select_runners():
                    loaded, why = runner.weight_updater.load_weights_from_distributed(weights)
                    success, message = success and loaded, message if loaded else why
        manager._session = self.module.msgspec.structs.replace(manager._session, loaded_weights=True)
        ended = self.end_original(manager, self.module.EndWeightUpdateReqInput())
        success, message = success and ended.success, message if ended.success else ended.message
        if reason := first_reason(manager.tp_cpu_group, "" if success else message):
            success, message = False, reason
        manager.record_weight_version_after_update(last.weight_version if success else FORGOTTEN)
        return manager.flush_cache_after_weight_update(last, success, message)

    def _forget(self) -> None:
        if self.staging is not None:
            self.staging.close()
        self.staging = None


def add_state(result: Any, *_: Any) -> Any:
    """Add Pronk's capabilities and the version of NCCL to a model process's state in /server_info; return the
    result."""
    import torch

    result.internal_state["updates_beside_generation"] = result.internal_state["takes_adapters"] = _wanted()
    if torch.version.cuda:
        result.internal_state["nccl"] = loaded_nccl()
    return result


def loaded_nccl() -> str:
    """Return the version of the NCCL library that this process has loaded; torch tells the one it was compiled with."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value % 10000 // 100}.{number.value % 100}"


# ---------------------------------------------------------------------- in the process that speaks HTTP


class Front:
    """Hooks of the HTTP process: pass requests on without SGLang's lock, which waits until no request runs, and keep
    this process's weight version up to date."""

    def __init__(self) -> None:
        self.version: str | None = None  # version of the open update, once it is complete

    async def update(self, _original: Any, manager: Any, request: Any, _http: Any = None) -> tuple[bool, str]:
        manager.auto_create_handle_loop()
        self.version = request.weight_version
        return _merged(await manager.update_weights_from_distributed_communicator(request))

    async def end(self, original: Any, manager: Any, request: Any, http: Any = None) -> tuple[bool, str]:
        """End an update. SGLang's request has no field for `discard`, so the request's id carries it to the model
        processes."""
        body = await http.json() if http is not None else None
        if isinstance(body, dict) and body.get("discard") is True:
            self.version, request.rid = None, DISCARD
        return await original(manager, request, http)

    async def begin_or_end(self, _original: Any, manager: Any, communicator: Any, request: Any) -> tuple[bool, str]:
        manager.auto_create_handle_loop()
        version, self.version = self.version, None
        success, message = _merged(await communicator(request))
        if success and version is not None and communicator is manager.end_weight_update_communicator:
            manager._update_weight_version_if_provided(version)
            if manager.mm_processor is not None:
                manager.mm_processor.clear_preprocess_cache()
        return success, message


def _merged(results: Any) -> tuple[bool, str]:
    from sglang.srt.managers.communicator import FanOutCommunicator

    return FanOutCommunicator.merge_results(results)


def _wanted() -> bool:
    return os.environ.get("PRONK_STAGE_WEIGHTS") != "0"


def register() -> None:
    """Register the hooks. SGLang calls this in each of its processes, before it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    state = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    HookRegistry.register(f"{state}.get_internal_state", add_state, HookType.AFTER)
    if not _wanted():
        return
    hooks, front, managers = WeightHooks(), Front(), "sglang.srt.managers"
    updater = f"{managers}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    control = f"{managers}.tokenizer_control_mixin.TokenizerControlMixin"
    HookRegistry.register(f"{updater}.begin_weight_update", hooks.begin, HookType.AROUND)
    HookRegistry.register(f"{updater}.update_weights_from_distributed", hooks.update, HookType.AROUND)
    HookRegistry.register(f"{updater}.end_weight_update", hooks.end, HookType.AROUND)
    HookRegistry.register(f"{control}.update_weights_from_distributed", front.update, HookType.AROUND)
    HookRegistry.register(f"{control}.end_weight_update", front.end, HookType.AROUND)
    HookRegistry.register(f"{control}._weight_update_session_call", front.begin_or_end, HookType.AROUND)
