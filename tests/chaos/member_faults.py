"""Members that are not sound join a sound run for a while: hosts, engines, addresses, connections, recipes. None of
them may end the run, hold it up, or be trained on."""

from __future__ import annotations

import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count

import zmq

from actor.actor_loop import EXIT_NO_LEARNER
from launch.engines.network import free_port
from shared.families.registry import vocab_size_in
from shared.types import Hello
from shared.wire.codec import encode
from tests.chaos.learner_faults import Inject
from tests.chaos.recovery import LEARNER, Recoveries
from tests.chaos.system import MODEL, System
from tests.support.hostile.engine_server import CONTENT, WIRE, HostileEngine
from tests.support.wires import raw

ENDS_S = 60.0
DEAD_ADDRESSES = 900  # of one Hello
SILENT_CONNECTIONS = 4200  # more than an engine serves
FIRST_INDEX = 100  # of actors beside the system's own
SKEWED = (  # valid recipes, each of which differs from the run's
    ("--env.max_tokens", "3", "--env.turn_tokens", "3"),
    ("--env.turn_tokens", "3"),
    ("--model.max_context", "96"),
    ("--env.module", "envs.colour"),
)


class MemberFaults:
    """Each adds a member for a while; several may be there at once."""

    def __init__(self, system: System, recoveries: Recoveries, rng: random.Random) -> None:
        self.system, self.recoveries, self.random = system, recoveries, rng
        self._indices = count(FIRST_INDEX)
        self._vocab_size = vocab_size_in(MODEL)
        self.all: Mapping[str, tuple[int, Inject]] = {  # weight and action
            "sick host joins": (3, partial(self.join, {"CHAOS_SICK": "1"})),
            "slow host joins": (3, partial(self.join, {"CHAOS_SLOW": "1"})),
            "host with another recipe": (3, self.join_skewed),
            "wrong engine joins": (3, self.join_wrong_engine),
            "dead addresses": (3, self.name_dead_addresses),
            "silent connections": (2, self.hold_connections),
            "learner of another run": (2, self.start_another_run),
        }

    def join(self, env: dict[str, str], name: str) -> bool:
        """A host whose actor fails at once, or takes long, and leaves without a word."""
        process = self._host([], env)
        seconds = self.random.uniform(10.0, 25.0)
        self.recoveries.after(seconds, lambda: end(process))
        return self.recoveries.expect_step_after(seconds, name)

    def join_skewed(self, name: str) -> bool:
        """It must be refused, and end by itself."""
        if self.recoveries.is_broken(LEARNER):
            return False
        skewed = self.random.choice(SKEWED)
        process, began = self._host([*skewed], {}), time.monotonic()

        def ended() -> bool:
            if process.poll() is None and time.monotonic() - began > 3 * ENDS_S:
                self.recoveries.blame(f"{name}: with {' '.join(skewed)} it was not refused")
                end(process)
            elif process.poll() not in (None, EXIT_NO_LEARNER):
                self.recoveries.blame(f"{name}: with {' '.join(skewed)} it ended with {process.poll()}, unrefused")
            return process.poll() is not None

        self.recoveries.expect(name, None, self.recoveries.a_step_after(ended))
        return True

    def join_wrong_engine(self, name: str) -> bool:
        """An engine that answers as an enemy would, named by an actor that plays nothing itself."""
        stack = ExitStack()
        engine = stack.enter_context(HostileEngine(port=free_port()))
        engine.spoil("/generate", self.random.choice([*CONTENT, ""]))
        if self.random.random() < 0.5:
            path = self.random.choice(("/model_info", "/init_weights_update_group", "/health", "/weights_checker"))
            engine.spoil(path, self.random.choice(list(WIRE)))
        return self._name_engines([engine.url], name, then=stack.close)

    def name_dead_addresses(self, name: str) -> bool:
        port = free_port()
        urls = [
            f"http://127.{self.random.randrange(1, 250)}.{i // 250}.{1 + i % 250}:{port}" for i in range(DEAD_ADDRESSES)
        ]
        return self._name_engines(urls, name)

    def _name_engines(self, urls: list[str], name: str, then: Callable[[], object] = lambda: None) -> bool:
        seconds = self.random.uniform(8.0, 20.0)
        hello = raw(encode(Hello(f"elsewhere-actor{next(self._indices)}#chaos", tuple(urls), self._vocab_size)))
        stop = threading.Event()

        def say() -> None:
            with zmq.Context() as context, context.socket(zmq.DEALER) as client:
                client.linger = 0
                client.connect(self.system.learner_address)
                while not stop.wait(1.0):
                    with suppress(zmq.Again):
                        client.send_multipart(hello, zmq.NOBLOCK)

        def leave() -> None:
            stop.set()
            then()

        threading.Thread(target=say, daemon=True).start()
        self.recoveries.after(seconds, leave)
        return self.recoveries.expect_step_after(seconds, name)

    def hold_connections(self, name: str) -> bool:
        """Strangers hold more connections to one engine than it serves, and say nothing."""
        engines = [slot for slot in self.system.members("engine") if not self.recoveries.is_broken(("engine", slot))]
        if not engines or not raise_limit(2 * SILENT_CONNECTIONS):
            return False
        slot = self.random.choice(engines)
        held: list[socket.socket] = []
        seconds = self.random.uniform(5.0, 12.0)

        def hold() -> None:
            for _ in range(SILENT_CONNECTIONS):
                with suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", self.system.engine_port + slot), timeout=2.0))

        holding = threading.Thread(target=hold, daemon=True)
        holding.start()

        def release() -> None:
            holding.join(ENDS_S)
            for each in held:
                each.close()

        self.recoveries.after(seconds, release)
        over = time.monotonic() + seconds
        self.recoveries.expect(name, ("engine", slot), lambda: time.monotonic() > over and self.recoveries.serves(slot))
        return True

    def start_another_run(self, name: str) -> bool:
        """The learner of another run is given the engines of this one: it must not get them while this one lives."""
        if self.recoveries.is_broken(LEARNER) or any(self.recoveries.is_broken(("engine", slot)) for slot in (0, 1)):
            return False
        address = f"tcp://127.0.0.1:{free_port()}"
        own = ["--run.name", f"another{next(self._indices)}", "--run.dir", str(self.system.folder / "others")]
        own += ["--learner.bind", address, "--actor.learner", address, "--learner.wait_timeout_s", "30"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = self.system.log
        arguments = [*self.system.arguments, *own]
        learner = subprocess.Popen([sys.executable, "launch/learner.py", *arguments], stdout=log, stderr=log, env=env)
        actor = self._host([*own, "--actor.processes", "1"], {})
        seconds = self.random.uniform(15.0, 30.0)
        self.recoveries.after(seconds, partial(end, learner))
        self.recoveries.after(seconds, partial(end, actor))

        def served() -> bool:
            return learner.poll() is not None and all(map(self.recoveries.serves, (0, 1)))

        self.recoveries.expect(name, None, self.recoveries.a_step_after(served))
        return True

    def _host(self, more: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.chaos.host", str(next(self._indices)), *self.system.arguments, *more]
        return subprocess.Popen(
            command,
            stdout=self.system.log,
            stderr=self.system.log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CHAOS_FLAGS": str(self.system.flags), **env},
        )


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def raise_limit(descriptors: int) -> bool:
    """Allow this process so many descriptors; return False if it may not have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < descriptors <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
    return hard >= descriptors
