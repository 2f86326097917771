"""The real system on this machine, under hostile input at every socket while it learns:

    python -m tests.hostile --seconds 90 --seed 0

A learner, two actors and two engines train the colour task; meanwhile generated input of every class comes to the
ticket socket (before and after authentication), to the engines' HTTP sockets (without and with their key), back from
the engines through a proxy that bends it, and out of datasets. The last line is one JSON object. The exit code is 0
only if no process has ended, none has grown beyond its bound since the tenth step, no ticket was trained twice or lost,
and the task is learned. It lasts at least so long, and until enough steps are trained.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from shared.config.sections import TransportConfig
from shared.keys import actor_keys, read_api_key
from shared.vision import VisionSpec
from shared.wire.codec import TokenRules
from shared.wire.endpoints import ActorKeys
from tests.chaos.report import audit, machine
from tests.hostile import connections, messages, rows
from tests.hostile.attack import Attack, Kind
from tests.hostile.requests import Engines
from tests.hostile.system import MODEL, System
from tests.hostile.watch import Watch
from tests.support.wires import EXAMPLES

STEPS = 80
LONGEST_S = 1800.0  # beyond `--seconds`, on a machine that has much else to do
GROWTH_MB = {"learner": 64.0, "actor": 64.0, "engine": 320.0, "supervisor": 16.0}  # an engine keeps 256 MiB of images
PEAK_MB = {"learner": 160.0, "actor": 192.0, "engine": 640.0, "supervisor": 16.0}  # with what is being read
SUCCESS = 0.9


def attacks(system: System, seed: int) -> list[Attack]:
    address = system.learner_address
    spec = VisionSpec.load(MODEL)
    vocab_size = int(json.loads(Path(MODEL, "config.json").read_text())["text_config"]["vocab_size"])
    rules = TokenRules(spec.image_token_id, spec.banned_ids, vocab_size)
    keys = actor_keys(TransportConfig(keys=str(system.keys), key_name="hostile"), address)
    assert isinstance(keys, ActorKeys)
    engines = Engines(system.engine_ports, read_api_key(str(system.keys / "engine.key")), rules)
    impostor = messages.Impostor(address, keys, rules)
    plain = [messages.raw(messages.encode(message)) for message in EXAMPLES]
    images = [*impostor.image_kinds(), *engines.image_kinds()]
    classes: dict[str, tuple[list[Kind], float]] = {
        "connections": (connections.kinds(address), 0.1),
        "strangers": (connections.stranger_kinds(address, keys.learner, plain), 0.5),
        "messages": (messages.message_kinds(address, keys, vocab_size), 0.05),
        "groups and images": ([*impostor.kinds(), *images, *images], 0.1),
        "requests": (engines.request_kinds(), 0.05),
        "bodies": (engines.body_kinds(), 0.1),
        "rows": (rows.kinds(system.folder / "read"), 0.3),
        "labels": ([rows.graded], 0.3),
    }
    return [Attack(name, kinds, every_s, seed) for name, (kinds, every_s) in classes.items()]


def run(system: System, watch: Watch, under: list[Attack], seconds: float) -> str:
    """Until the time is over and enough steps are trained; why it ended earlier, "" if it did not."""
    began, step, begun = time.monotonic(), 0, False
    while True:
        watch.look(system.processes(), step)
        if watch.dead:
            return f"ended: {', '.join(watch.dead)}"
        step = max((int(row["step"]) for row in system.rows() if "rollout/reward" in row), default=0)
        now = time.monotonic()
        if step >= 1 and not begun:
            began, begun = now, True
            for proxy in system.proxies:
                proxy.bending = True
            for attack in under:
                attack.start()
        if begun and now - began > seconds and step >= STEPS:
            return ""
        if now - began > seconds + LONGEST_S:
            return f"only {step} steps within {now - began:.0f} s"
        time.sleep(0.5)


def refused(system: System, under: list[Attack]) -> dict[str, int]:
    """By reason: what the senders learned, and what the learner counted."""
    counts = sum((attack.refused for attack in under), Counter[str]())
    counted = [row for row in system.rows() if "tickets/issued" in row]
    for name, value in counted[-1].items() if counted else ():
        if re.match(r"(wire/rejected|tickets/dropped|tickets/refused)/", name) and value:
            counts[name] += int(value)
    return dict(sorted(counts.items()))


def outcome(system: System) -> dict[str, Any]:
    """Held-out success before and at the end, and what the ledger says."""
    success = [row["eval/success"] for row in system.rows() if "eval/success" in row]
    steps = max((int(row["step"]) for row in system.rows() if "rollout/reward" in row), default=0)
    found = {
        "success_before": success[0] if success else None,
        "success_after": success[-1] if len(success) > 1 else None,
    }
    checked = audit(system.run) if list(system.run.glob("checkpoints/step_*")) else {"duplicates": -1, "lost": -1}
    return {**found, "steps": steps, "duplicates": checked["duplicates"], "lost": checked["lost"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", metavar="CLASS", help="send these classes alone, to find what does harm")
    parser.add_argument("--folder", type=Path, help="of the run; a new one in the temporary folder by default")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="hostile-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the processes started here end too
    system = System(folder, options.seed)
    watch, under, early, badly = Watch(), attacks(system, options.seed), "stopped", list[str]()
    under = [attack for attack in under if options.only is None or attack.name in options.only]
    for proxy in system.proxies:
        proxy.share *= options.only is None or "answers" in options.only
    try:
        early = run(system, watch, under, options.seconds)
    finally:
        for attack in under:
            attack.stop()
        badly = system.stop()
    return report(system, watch, under, early, badly, options.seed)


def report(system: System, watch: Watch, under: list[Attack], early: str, badly: list[str], seed: int) -> int:
    """Prints the result; the exit code."""
    sent = {attack.name: attack.sent for attack in under} | {"rows of the run": system.num_rows["hostile"]}
    sent["answers"] = sum(proxy.bent.total() for proxy in system.proxies)
    defects = sum((attack.defects for attack in under), Counter[str]())
    growth, found = watch.growth_mb(), outcome(system)
    peak = watch.peak_mb()
    grown = [name for name, value in growth.items() if value > GROWTH_MB[name.split()[0]]]
    grown += [f"{name} for a moment" for name, value in peak.items() if value > PEAK_MB[name.split()[0]]]
    good = not (early or badly or defects or watch.dead or grown or found["duplicates"] or found["lost"])
    good &= (found["success_after"] or 0.0) >= SUCCESS
    result = {"ok": good, "seed": seed, "sent": sent, "refused": refused(system, under)}
    result |= {"processes_died": len(watch.dead), "rss_growth_mb": growth, "rss_peak_mb": peak, **found}
    result |= {"tracebacks": system.said().count("Traceback (most recent call last)"), "machine": machine()}
    result |= {"folder": str(system.folder)}
    result |= (
        {} if good else {"early": early, "ended_badly": badly, "dead": watch.dead, "defects": defects, "grown": grown}
    )
    print(json.dumps(result))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
