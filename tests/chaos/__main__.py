"""The real system on this machine under random faults: two learner ranks, two engines, three actors, agents, a
bad line and disk.

    python -m tests.chaos --minutes 5 --seed 0

A fault comes every few seconds, whether or not the system has recovered from the last one; only what is broken is not
broken again. The time to recover runs from the injection (so it includes how long a process stands still or a line is
cut) to what this fault holds up: an actor's first group after its restart, an engine that serves the run's weights
again, the next trained step, the next checkpoint. The run ends with a table of these times and with what the ledger
says: no ticket and no episode trained twice, none lost, and a policy that has learned. The last line is one JSON
object; the exit code is 1 if any of that fails, a process ends that no fault has ended, the system does not recover
from a fault, or fewer than 12 faults a minute were injected.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.faults import Faults
from tests.chaos.report import audit, learning, machine, slow, table
from tests.chaos.system import System

FAULTS_A_MINUTE = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=4.0, metavar="SECONDS", help="between faults, on average")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="FAULT", help="for trying: these, however few they are"
    )
    parser.add_argument("--no-disk", action="store_true", help="no faults of the disk, which need root anyway")
    parser.add_argument("--folder", type=Path, help="of the run; a new one in the temporary folder by default")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the processes started here end too
    system = System(folder, options.seed, disk=not options.no_disk)
    try:
        faults = Faults(system, options.seed, options.only)
        recoveries = faults.recoveries
        recoveries.expect("start", None, recoveries.a_step_after(lambda: True))
        faults.run(0.0, options.every)
        faults.run(60 * options.minutes, options.every)
    finally:
        system.stop()
    found = {**audit(system.run, system.proxy.tickets_of), **learning(system.rows())}
    print(table(faults.injected, recoveries.finished, found))
    total = faults.injected.total()
    good = not (found["duplicates"] or found["lost"] or found["steps_missing_in_ledger"] or recoveries.given_up)
    good &= not (found["episodes_trained_twice"] or system.deaths.unexplained)
    good &= found["steps_with_agents"] > 0
    if not options.only:
        good &= found["reward_last"] > found["reward_first"] + 0.2 and total >= FAULTS_A_MINUTE * options.minutes
    result = {"ok": good, "seed": options.seed, "minutes": options.minutes, "faults": total, "machine": machine()}
    result |= {"deaths": system.deaths.explained, "unexplained_deaths": system.deaths.unexplained}
    result |= {"not_recovered": recoveries.given_up, "beyond_limit": slow(recoveries.finished), "folder": str(folder)}
    result |= {"no_disk": system.no_disk} if system.no_disk else {}
    result |= {"no_sockets": system.no_sockets} if system.no_sockets else {}
    print(json.dumps({**result, **found, "messages": dict(system.proxy.counts)}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
