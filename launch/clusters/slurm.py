"""Slurm: one job for the learner's hosts, and job arrays with one job for each engine host and for each host with only
actors; these jobs may come and go independently. The jobs find one another through the run's cluster folder, on the
file system that all hosts share: the learner's job writes its address there, and removes it when the run is over.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from launch.clusters.host_layout import FIND_S, ClusterLayout, call, make_missing_keys, write
from launch.processes.children import ROOT
from shared.config.recipe import ConfigError

CURE = "call this on a login node of the cluster, or install Slurm's commands"
ADDRESS = "learner.address"
MISTAKE = "learner.mistake"
JOBS = "jobs.json"


def render(made: ClusterLayout) -> dict[str, str]:
    """Return the scripts: file name -> text."""
    files = {"learner.sbatch": _learner(made), "engines.sbatch": _engines(made)}
    return files | ({"actors.sbatch": _actors(made)} if made.recipe.cluster.actor_nodes else {})


def submit(made: ClusterLayout) -> str:
    cluster, folder = made.recipe.cluster, made.folder
    running = _live(folder)
    if running:
        raise ConfigError(
            f"jobs {', '.join(running)} of this run are in the queue: stop them first (launch/cluster.py stop)"
        )
    _check_partition("partition", cluster.slurm.partition)
    _check_partition("actor_partition", cluster.slurm.actor_partition)
    make_missing_keys(folder)
    write(render(made), made)
    (folder / ADDRESS).unlink(missing_ok=True)
    learner = _sbatch(folder / "learner.sbatch")
    jobs = {"learner": learner}
    for part in ("engines", "actors") if cluster.actor_nodes else ("engines",):
        jobs[part] = _sbatch(folder / f"{part}.sbatch", f"--dependency=after:{learner}")
    (folder / JOBS).write_text(json.dumps(jobs) + "\n")
    return f"jobs {', '.join(f'{job} ({part})' for part, job in jobs.items())}; logs in {folder / 'logs'}"


def status(made: ClusterLayout) -> str:
    jobs = _jobs(made.folder)
    form = "%.18i %.24j %.10T %.12M %.8D %R"
    lines = call("squeue", "--jobs", ",".join(jobs.values()), "--format", form, cure=CURE) if _live(made.folder) else ""
    return lines.rstrip() or f"no job of {made.job} is in the queue; its logs are in {made.folder / 'logs'}"


def stop(made: ClusterLayout) -> str:
    """Cancel the run's jobs: the learner ends its step and writes a checkpoint, then its job ends; all other jobs end
    at once."""
    jobs = _jobs(made.folder)
    (made.folder / ADDRESS).unlink(missing_ok=True)  # without this file no job restarts itself
    live = _live(made.folder)
    if others := [job for part, job in jobs.items() if part != "learner" and job in live]:
        call("scancel", *others, cure=CURE)
    if jobs["learner"] in live:
        call("scancel", "--state=PENDING", jobs["learner"], cure=CURE)
        if jobs["learner"] in _live(made.folder):  # it was started meanwhile
            call("scancel", "--signal=TERM", jobs["learner"], cure=CURE)
    return f"asked {', '.join(live)} to end" if live else "no job of this run is in the queue"


def _check_partition(field: str, name: str) -> None:
    """Raise ConfigError, which lists the partitions, for an unknown one; "" is the cluster's default partition."""
    if name and not call("sinfo", "-h", "-p", name, "-o", "%P", cure=CURE).strip():
        known = call("sinfo", "-h", "-o", "%R", cure=CURE).split()
        raise ConfigError(f"cluster.slurm.{field} = {name!r} is not there; choose one of {', '.join(known)}")


def _sbatch(script: Path, *options: str) -> str:
    return call("sbatch", "--parsable", *options, str(script), cure=CURE).strip().partition(";")[0]


def _jobs(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / JOBS).read_text()))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no jobs: this run was not submitted to Slurm") from None


def _live(folder: Path) -> list[str]:
    """Return the run's jobs that are in the queue."""
    if not (folder / JOBS).exists():
        return []
    queued = set(call("squeue", "--me", "--noheader", "--format", "%A %F", cure=CURE).split())
    return [job for job in _jobs(folder).values() if job in queued]


# ------------------------------------------------------------------ scripts


def _head(made: ClusterLayout, part: str, nodes: int, gpus: int, *more: str) -> str:
    cluster, slurm = made.recipe.cluster, made.recipe.cluster.slurm
    minutes, partition = round(cluster.hours * 60), slurm.partition
    if part == "actors" and slurm.actor_partition:
        partition = slurm.actor_partition
    lines = [
        f"--job-name={made.job}-{part}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        *([f"--cpus-per-task={cluster.cpus_per_node}"] if cluster.cpus_per_node else ["--exclusive"]),
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *([f"--mem={cluster.memory_gb}G"] if cluster.memory_gb else []),
        *([f"--time={minutes}"] if minutes else []),
        *([f"--partition={partition}"] if partition else []),
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


def _learner(made: ClusterLayout) -> str:
    cluster, logs = made.recipe.cluster, f"{made.folder}/logs"
    more = (f"--output={logs}/learner.log", f"--signal=TERM@{made.learner_leave_s}")  # sent before the time limit
    task = f"""trap : TERM  # which the learner has too, and answers
{made.learner_command("$host")}
code=$?
((code == 2)) && touch "$folder/{MISTAKE}"
exit "$code"
"""
    return f"""\
{_head(made, "learner", cluster.learner_nodes, made.learner_gpus, *more)}
export host folder
rm -f "$folder/{MISTAKE}"

# Here the engines' jobs find this one, wherever it starts again.
echo "tcp://$host:{made.learner_port}" > "$folder/{ADDRESS}.new" && mv "$folder/{ADDRESS}.new" "$folder/{ADDRESS}"

srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" \\
  bash -c {shlex.quote(task)}
code=$?

# A mistake in the recipe (code 2 of any host, whatever srun makes of it) stays one; anything else is tried again, from
# the last checkpoint, unless the run was stopped, which takes the address away.
[ -e "$folder/{MISTAKE}" ] && code=2
if ((code != 0 && code != 2 && ${{SLURM_RESTART_COUNT:-0}} < {cluster.restarts})) && [ -s "$folder/{ADDRESS}" ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
rm -f "$folder/{ADDRESS}"
exit "$code"
"""


def _engines(made: ClusterLayout) -> str:
    command = made.engines_command(_FOUND, "$host", "SLURM_ARRAY_TASK_ID")
    return _array(made, "engines", made.recipe.cluster.engine_nodes, made.engine_gpus, command)


def _actors(made: ClusterLayout) -> str:
    return _array(made, "actors", made.recipe.cluster.actor_nodes, 0, made.actors_command(_FOUND))


_FOUND = f'$(cat "$folder/{ADDRESS}")'


def _array(made: ClusterLayout, part: str, nodes: int, gpus: int, command: str) -> str:
    """Return the script of an array of jobs, one for each host."""
    restarts = made.recipe.cluster.restarts
    more = (f"--array=0-{nodes - 1}", f"--output={made.folder}/logs/{part}-%a.log")
    return f"""\
{_head(made, part, 1, gpus, *more)}
# The learner's job writes its address when it starts.
for ((second = 0; second < {FIND_S}; second++)); do
  [ -s "$folder/{ADDRESS}" ] && break
  sleep 1
done

# Until the run is over. It starts again, and looks for the learner anew, if it fails or loses it.
for ((start = 0; start <= {restarts}; start++)); do
  [ -s "$folder/{ADDRESS}" ] || {{ echo "the learner is not there: $folder/{ADDRESS} is missing"; exit 0; }}
  srun --cpus-per-task="$SLURM_CPUS_ON_NODE" \\
    {command}
  code=$?
  ((code == 0 || code == 2)) && exit "$code"
  sleep 5
done
exit "$code"
"""
