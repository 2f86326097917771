"""Processes of Pronk for tests, forked from one that has imported torch and transformers already.

Those imports take some five seconds of a core and are the same in every process, so a test that needs a run, and not
the start of one, asks for `forked_starts` (tests/conftest.py). Then `subprocess` forks the programs of `SCRIPTS` and
`MODULES`, with the arguments, environment, folder, files and session that it was told; a launcher's own children too.
All else of them is as usual: process, id, parent, signals, exit code, sockets, and the import of Pronk's own modules,
of which none is loaded before. What a library reads of the environment while it is imported, and what is in /proc
about how a process was started, is that of the process that forks: tests of those start their processes as usual.

Whoever starts programs has such a process, the seed, as its child. The seed forks twice; the one in between ends, and
Linux makes the program a child of the one that asked, which adopts orphans for that moment.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

LAUNCHERS = ("local", "actors", "evaluate")  # they start programs themselves
SCRIPTS = (*LAUNCHERS, "learner")
MODULES = ("actor.engine.server", "actor.worker", "learner.export", "learner.replay")
LIBRARIES = (
    "aiohttp", "matplotlib.backends.backend_agg", "matplotlib.figure", "msgspec", "numpy", "PIL.Image",
    "pyarrow.parquet", "pydantic_settings", "rich", "torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto", "transformers.models.qwen3_vl.modeling_qwen3_vl", "xxhash", "zmq.asyncio",
)  # fmt: skip
PR_SET_CHILD_SUBREAPER = 36
MOST_BYTES = 1 << 20


class Order(NamedTuple):
    program: list[str]  # a script or -m and a module, then arguments
    unbuffered: bool
    env: dict[str, str]
    folder: str
    new_session: bool
    before: bytes  # a pickled function that the new process calls first

    @property
    def launches(self) -> bool:
        return Path(self.program[0]).stem in LAUNCHERS


class Seed:
    """The process that forks, as its parent sees it."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._lock = control, threading.Lock()

    def start(self, order: Order, files: Sequence[int]) -> int:
        """The new process's id; `files` are its stdin, stdout and stderr. RuntimeError if the seed has ended."""
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._control, [pickle.dumps(tuple(order))], files)
                pid = self._control.recv(64)
            finally:
                _adopt_orphans(False)
        if not pid:
            raise RuntimeError("the process that forks programs for tests has ended")
        return int(pid)

    def close(self) -> None:
        self._control.close()


class ForkingPopen(subprocess.Popen):
    """Asks `seed` for what it can fork, and starts all else as usual."""

    seed: Seed

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        close_fds, pass_fds, cwd, env, _, _, shell, *more = rest
        pipes, new_session, process_group = more[:6], more[-2], more[-1]
        usual = executable or pass_fds or shell or not close_fds or process_group != -1
        order = None if usual else order_of(args, preexec_fn, cwd, env, new_session)
        if order is None:
            super()._execute_child(args, executable, preexec_fn, *rest)
            return
        told = pipes[0], pipes[3], pipes[5]
        self.pid = self.seed.start(order, [own if file == -1 else file for own, file in enumerate(told)])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def order_of(
    args: Any, before: Callable[[], None] | None, folder: Any, env: Mapping[str, str] | None, new_session: bool
) -> Order | None:
    """None for a program that is not forked."""
    told = [os.fsdecode(arg) for arg in args] if isinstance(args, list | tuple) else [""]
    unbuffered = told[1:2] == ["-u"]
    program = told[1 + unbuffered :]
    script = Path(program[0]) if program else Path()
    ours = script.parent.name == "launch" and script.suffix == ".py" and script.stem in SCRIPTS
    if told[0] != sys.executable or not (ours or (program[:1] == ["-m"] and program[1] in MODULES)):
        return None
    try:
        pickled = pickle.dumps(before)
    except (pickle.PicklingError, AttributeError):
        return None
    told_env, where = dict(os.environ if env is None else env), os.path.abspath(folder or ".")
    return Order(program, unbuffered, told_env, where, new_session, pickled)


def start_seed(env: Mapping[str, str]) -> tuple[Seed, subprocess.Popen[bytes]]:
    """A seed with nothing imported but libraries, and its process, which ends when the seed is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return Seed(ours), process


# ---------------------------------------------------------------------- in the process that forks


def next_program(control: socket.socket) -> Order:
    """Forks until its parent has ended; returns in each process that is to run a program, and is prepared for it."""
    order, files = _fork_all(control)
    _become(order, files)
    if order.launches:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            _leave_files()
            return next_program(theirs)
        theirs.close()
        ForkingPopen.seed = Seed(ours)
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
    if before := pickle.loads(order.before):
        before()
    return order


def _fork_all(control: socket.socket) -> tuple[Order, list[int]]:
    while True:
        message, files, *_ = socket.recv_fds(control, MOST_BYTES, 3)
        if not message:
            os._exit(0)
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if pid := os.fork():
                os.write(tell, str(pid).encode())
                os._exit(0)
            control.close()
            os.close(told)
            os.close(tell)
            while os.getppid() == between:
                time.sleep(0.001)
            return Order(*pickle.loads(message)), files
        os.waitpid(between, 0)
        control.send(os.read(told, 64))
        for file in (told, tell, *files):
            os.close(file)


def _become(order: Order, files: Sequence[int]) -> None:
    """What is different about each process of the same libraries."""
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    if order.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.env)
    script = order.program[0]
    first = order.folder if script == "-m" else os.path.dirname(os.path.abspath(script))
    sys.path[:0] = [first, *filter(None, order.env.get("PYTHONPATH", "").split(os.pathsep))]
    raw = partial(open, closefd=False)
    sys.stdin = sys.__stdin__ = TextIOWrapper(raw(0, "rb"))
    sys.stdout = sys.__stdout__ = TextIOWrapper(raw(1, "wb"), line_buffering=order.unbuffered or os.isatty(1))
    sys.stderr = sys.__stderr__ = TextIOWrapper(raw(2, "wb"), line_buffering=True, errors="backslashreplace")
    importlib.import_module("numpy").random.seed()  # Python's own generator notices a fork


def _leave_files() -> None:
    """A seed holds no pipe open, and heeds no signal to the group but its parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for place in range(3):
        os.dup2(nothing, place)
    os.close(nothing)


def _adopt_orphans(wanted: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _run(order: Order) -> int:
    """Runs the program as Python would; its exit code."""
    script, *arguments = order.program
    try:
        if script == "-m":
            sys.argv = arguments
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = order.program
            runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001 - as Python does
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Without taking libraries apart, as multiprocessing ends what it has forked: triton says then what it leaks."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    del sys.path[0]  # this folder, where Python looks for modules of a script
    gc.disable()
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end(_run(next_program(socket.socket(fileno=int(sys.argv[1])))))
