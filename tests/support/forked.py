"""Starts Pronk's processes for tests by forking one that has already imported torch and transformers.

These imports take some five seconds of CPU time and are the same in every process. So a test that needs a run, but does
not test its start, uses the fixture `forked_starts` (tests/conftest.py). Then `subprocess` forks the programs in
`SCRIPTS`, `MODULES` and `RANKS`, with the given arguments, environment, folder, files and session; likewise for the
children of a launcher. Everything else is as usual: the process has its own id, parent, signals, exit code and sockets,
and imports Pronk's modules itself, since none is loaded before. Only the environment that libraries read at their
import, and the information in /proc about the start, are those of the forking process: tests of these start their
processes in the usual way.

The process that starts programs has such a forking process, the seed, as its child. The seed forks twice; the process
in between ends, and Linux makes the program a child of the starting process, which is a subreaper (adopts orphans) for
that moment.
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
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

LAUNCHERS = ("local", "actors", "evaluate", "run", "doctor", "torchrun")  # these start programs themselves
SCRIPTS = (*LAUNCHERS, "learner", "trial_rank")
MODULES = ("actor.engine.server", "actor.worker", "learner.export", "learner.replay")
RANKS = ("tests.support.learner_ranks", "tests.support.ranks.")  # these fork ranks themselves
LIBRARIES = (
    "aiohttp", "matplotlib.backends.backend_agg", "matplotlib.figure", "msgspec", "numpy", "PIL.Image",
    "pyarrow.parquet", "pydantic_settings", "rich", "torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto", "transformers.models.qwen3_vl.modeling_qwen3_vl", "xxhash", "zmq.asyncio",
)  # fmt: skip
TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"  # starts torchrun's ranks
PR_SET_CHILD_SUBREAPER = 36
MOST_BYTES = 1 << 20


class Order(NamedTuple):
    program: list[str]  # a script, or -m and a module, then arguments
    unbuffered: bool
    env: dict[str, str]
    folder: str
    new_session: bool
    before: bytes  # pickled function that the new process calls first

    @property
    def launches(self) -> bool:
        return Path(self.program[0]).stem in LAUNCHERS


class Seed:
    """The parent's handle of the seed, the process that forks."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._lock = control, threading.Lock()

    def start(self, order: Order, files: Sequence[int]) -> int:
        """Start a program; return its process id. `files` are its stdin, stdout and stderr. Raise RuntimeError if the
        seed has ended."""
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
    """A Popen that lets `seed` fork the programs that it can fork, and starts all others as usual."""

    seed: Seed

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        close_fds, pass_fds, cwd, env, _, _, shell, *more = rest
        pipes, new_session, process_group = more[:6], more[-2], more[-1]
        usual = executable or pass_fds or shell or not close_fds or process_group != -1
        order = None if usual else order_of(args, preexec_fn, cwd, env, new_session)
        if order is None:
            super()._execute_child(args, executable, preexec_fn, *rest)
            return
        streams = pipes[0], pipes[3], pipes[5]
        self.pid = self.seed.start(order, [number if file == -1 else file for number, file in enumerate(streams)])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def order_of(
    args: Any, before: Callable[[], None] | None, folder: Any, env: Mapping[str, str] | None, new_session: bool
) -> Order | None:
    """Return the order for a program; None for a program that cannot be forked."""
    words = [os.fsdecode(arg) for arg in args] if isinstance(args, list | tuple) else [""]
    unbuffered = words[1:2] == ["-u"]
    program = words[1 + (words[1:2] in (["-u"], ["-P"])) :]
    script = Path(program[0]) if program else Path()
    is_script = "launch" in script.parts and script.suffix == ".py" and script.stem in SCRIPTS
    is_module = program[:1] == ["-m"] and (program[1] in MODULES or program[1].startswith(RANKS))
    if words[0] != sys.executable or not (is_script or is_module):
        return None
    try:
        pickled = pickle.dumps(before)
    except (pickle.PicklingError, AttributeError):
        return None
    variables = dict(os.environ if env is None else env)
    return Order(program, unbuffered, variables, os.path.abspath(folder or "."), new_session, pickled)


def start_seed(env: Mapping[str, str]) -> tuple[Seed, subprocess.Popen[bytes]]:
    """Start a seed, which imports only libraries; return its handle and its process, which ends when the handle is
    closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return Seed(ours), process


# ---------------------------------------------------------------------- in the process that forks


def next_program(control: socket.socket) -> Order:
    """Fork until the parent has ended. Returns only in the forked processes, each prepared to run its program."""
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
        importlib.import_module(TORCHRUN).Popen = ForkingPopen  # type: ignore[attr-defined]
    if before := pickle.loads(order.before):
        before()
    return order


def _fork_all(control: socket.socket) -> tuple[Order, list[int]]:
    while True:
        message, files, *_ = socket.recv_fds(control, MOST_BYTES, 3)
        if not message:
            os._exit(0)
        read_end, write_end = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if pid := os.fork():
                os.write(write_end, str(pid).encode())
                os._exit(0)
            control.close()
            os.close(read_end)
            os.close(write_end)
            while os.getppid() == between:
                time.sleep(0.001)
            return Order(*pickle.loads(message)), files
        os.waitpid(between, 0)
        control.send(os.read(read_end, 64))
        for file in (read_end, write_end, *files):
            os.close(file)


def _become(order: Order, files: Sequence[int]) -> None:
    """Set up the forked process: files, session, signals, folder, environment, sys.path, streams and random seed."""
    for number, file in enumerate(files):
        os.dup2(file, number)
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
    tempfile.tempdir = None  # TMPDIR may be another one
    importlib.import_module("numpy").random.seed()  # Python's own generator reseeds after a fork


def _leave_files() -> None:
    """Close the standard streams, so that no pipe stays open, and ignore signals to the process group; only the
    parent's end ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)


def _adopt_orphans(wanted: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _run(order: Order) -> int:
    """Run the program as Python would; return its exit code."""
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
    """End without finalizing libraries, as multiprocessing does; else triton would print what it leaks."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    del sys.path[0]  # this folder, which Python has added for the script
    gc.disable()
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end(_run(next_program(socket.socket(fileno=int(sys.argv[1])))))
