"""Slurm: one job for the learner's hosts, and an array with one job an engine host, which come and go by themselves.

The jobs find one another in the run's cluster folder, on the file system that all hosts share: the learner's job writes
its address there, and takes it away when the run is over.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from launch.clusters.layout import FIND_S, Layout, call, make_missing_keys, write
from launch.processes.children import ROOT
from shared.config import ConfigError

CURE = "call this on a login node of the cluster, or install Slurm's commands"
ADDRESS = "learner.address"
JOBS = "jobs.json"


def render(made: Layout) -> dict[str, str]:
    """File name -> text."""
    return {"learner.sbatch": _learner(made), "engines.sbatch": _engines(made)}


def submit(made: Layout) -> str:
    cluster, folder = made.recipe.cluster, made.folder
    running = _live(folder)
    if running:
        raise ConfigError(
            f"jobs {', '.join(running)} of this run are in the queue: stop them first (launch/cluster.py stop)"
        )
    if (
        cluster.slurm.partition
        and not call("sinfo", "-h", "-p", cluster.slurm.partition, "-o", "%P", cure=CURE).strip()
    ):
        known = call("sinfo", "-h", "-o", "%R", cure=CURE).split()
        raise ConfigError(
            f"cluster.slurm.partition = {cluster.slurm.partition!r} is not there; choose one of {', '.join(known)}"
        )
    make_missing_keys(folder)
    write(render(made), made)
    (folder / ADDRESS).unlink(missing_ok=True)
    learner = _sbatch(folder / "learner.sbatch")
    engines = _sbatch(folder / "engines.sbatch", f"--dependency=after:{learner}")
    (folder / JOBS).write_text(json.dumps({"learner": learner, "engines": engines}) + "\n")
    return f"jobs {learner} (learner) and {engines} (engines); logs in {folder / 'logs'}"


def status(made: Layout) -> str:
    jobs = _jobs(made.folder)
    form = "%.18i %.24j %.10T %.12M %.8D %R"
    lines = call("squeue", "--jobs", ",".join(jobs.values()), "--format", form, cure=CURE) if _live(made.folder) else ""
    return lines.rstrip() or f"no job of {made.job} is in the queue; its logs are in {made.folder / 'logs'}"


def stop(made: Layout) -> str:
    """The learner ends its step and writes a checkpoint, then its job ends; the engines' jobs end at once."""
    jobs = _jobs(made.folder)
    (made.folder / ADDRESS).unlink(missing_ok=True)  # without it no job starts itself again
    live = _live(made.folder)
    if jobs["engines"] in live:
        call("scancel", jobs["engines"], cure=CURE)
    if jobs["learner"] in live:
        call("scancel", "--state=PENDING", jobs["learner"], cure=CURE)
        if jobs["learner"] in _live(made.folder):  # it has started
            call("scancel", "--signal=TERM", jobs["learner"], cure=CURE)
    return f"asked {', '.join(live)} to end" if live else "no job of this run is in the queue"


def _sbatch(script: Path, *options: str) -> str:
    return call("sbatch", "--parsable", *options, str(script), cure=CURE).strip().partition(";")[0]


def _jobs(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / JOBS).read_text()))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no jobs: this run was not submitted to Slurm") from None


def _live(folder: Path) -> list[str]:
    """Those of the run's jobs that are in the queue."""
    if not (folder / JOBS).exists():
        return []
    mine = set(call("squeue", "--me", "--noheader", "--format", "%A %F", cure=CURE).split())
    return [job for job in _jobs(folder).values() if job in mine]


# ------------------------------------------------------------------ scripts


def _head(made: Layout, part: str, nodes: int, gpus: int, *more: str) -> str:
    cluster, slurm = made.recipe.cluster, made.recipe.cluster.slurm
    minutes = round(cluster.hours * 60)
    lines = [
        f"--job-name={made.job}-{part}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        *([f"--cpus-per-task={cluster.cpus_per_node}"] if cluster.cpus_per_node else ["--exclusive"]),
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *([f"--mem={cluster.memory_gb}G"] if cluster.memory_gb else []),
        *([f"--time={minutes}"] if minutes else []),
        *([f"--partition={slurm.partition}"] if slurm.partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
        "--requeue",
        "--open-mode=append",
        *more,
        *slurm.options,
    ]
    start = f"""\
set -uo pipefail
cd {shlex.quote(str(ROOT))}
. {shlex.quote(cluster.environment)}/bin/activate
folder={shlex.quote(str(made.folder))}
host=$({cluster.address})
"""
    return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines) + start


def _learner(made: Layout) -> str:
    cluster, logs = made.recipe.cluster, f"{made.folder}/logs"
    more = (f"--output={logs}/learner.log", f"--signal=TERM@{made.learner_leave_s}")  # before the time limit
    return f"""\
{_head(made, "learner", cluster.learner_nodes, made.learner_gpus, *more)}
# Here the engines' jobs find this one, wherever it starts again.
echo "tcp://$host:{made.learner_port}" > "$folder/{ADDRESS}.new" && mv "$folder/{ADDRESS}.new" "$folder/{ADDRESS}"

srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" \\
  {made.learner_command("$host")}
code=$?

# A mistake in the recipe (code 2) stays one; anything else is tried again, from the last checkpoint, unless the run was
# stopped, which takes the address away.
if ((code != 0 && code != 2 && ${{SLURM_RESTART_COUNT:-0}} < {cluster.restarts})) && [ -s "$folder/{ADDRESS}" ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
rm -f "$folder/{ADDRESS}"
exit "$code"
"""


def _engines(made: Layout) -> str:
    cluster, logs = made.recipe.cluster, f"{made.folder}/logs"
    more = (f"--array=0-{cluster.engine_nodes - 1}", f"--output={logs}/engines-%a.log")
    command = made.engines_command(f'$(cat "$folder/{ADDRESS}")', "$host", "SLURM_ARRAY_TASK_ID")
    return f"""\
{_head(made, "engines", 1, made.engine_gpus, *more)}
# The learner's job writes its address when it starts.
for ((second = 0; second < {FIND_S}; second++)); do
  [ -s "$folder/{ADDRESS}" ] && break
  sleep 1
done

# Engines and actors, until the run is over. They start again, and look for the learner anew, if they fail or lose it.
for ((start = 0; start <= {cluster.restarts}; start++)); do
  [ -s "$folder/{ADDRESS}" ] || {{ echo "the learner is not there: $folder/{ADDRESS} is missing"; exit 0; }}
  srun --cpus-per-task="$SLURM_CPUS_ON_NODE" \\
    {command}
  code=$?
  ((code == 0 || code == 2)) && exit "$code"
  sleep 5
done
exit "$code"
"""
