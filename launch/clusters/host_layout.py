"""The hosts of a run on a cluster, the command of each, and the paths of scripts, keys and logs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from launch.processes.children import ROOT
from launch.recipe_fields import save_recipe
from shared.config.recipe import ConfigError, Recipe
from shared.keys import make_api_key, make_keys, read_api_key

CLIENT_TIMEOUT_S = 60.0
FIND_S = 600  # how long a host with engines or actors waits for the learner
_JOB_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Paths, on the hosts, of the files that the run needs."""

    config: str
    keys: str
    runs: str
    project: str


# The paths on hosts that do not share this host's file system, and get copies of all files.
CONTAINER = HostPaths("/pronk/config/recipe.toml", "/pronk/keys", "/pronk/runs", "/opt/pronk")


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """A run's hosts and their commands. `folder`, on this host, has the scripts or manifests, the recipe and the
    keys."""

    recipe: Recipe
    folder: Path
    paths: HostPaths

    @property
    def job(self) -> str:
        """The run's name in a form that schedulers accept. Raises ConfigError if it cannot be converted."""
        name = re.sub(r"[^a-z0-9]+", "-", self.recipe.run.name.lower()).strip("-")
        if not _JOB_NAME.fullmatch(name):
            raise ConfigError(f"run.name = {self.recipe.run.name!r}: on a cluster use up to 40 letters, digits and '-'")
        return f"pronk-{name}"

    @property
    def learner_gpus(self) -> int:
        """GPUs of one learner host."""
        return self.recipe.cluster.gpus_per_node if self.recipe.learner.device == "cuda" else 0

    @property
    def engine_gpus(self) -> int:
        return self.recipe.cluster.gpus_per_node if self.recipe.engine.device == "cuda" else 0

    @property
    def learner_port(self) -> int:
        return int(self.recipe.learner.bind.rpartition(":")[2])

    @property
    def learner_leave_s(self) -> int:
        """Seconds from the signal to end until the learner is killed; in this time it ends its step and writes a
        checkpoint."""
        return round(self.recipe.learner.leave_timeout_s) + 30

    def learner_command(self, head: str) -> str:
        """Return the shell command of each learner host; `head` is a shell word that gives the first host's address."""
        cluster = self.recipe.cluster
        ranks = self.learner_gpus or cluster.ranks_per_node
        meeting = "--standalone"
        if cluster.learner_nodes > 1:
            meeting = (
                f"--nnodes {cluster.learner_nodes} --rdzv-backend c10d --rdzv-id {self.job} "
                f'--rdzv-endpoint "{head}:{cluster.rendezvous_port}"'
            )
        return (
            f"python launch/processes/torchrun.py {meeting} --nproc-per-node {ranks} \\\n"
            f"  launch/learner.py --config {shlex.quote(self.paths.config)}"
        )

    def engines_command(self, learner: str, host: str, number: str) -> str:
        """Return the shell command of each engine host. The arguments are shell words that give the learner's address,
        the host's own address, and its number, which keeps the ports of two hosts on one machine apart."""
        engine, alone = self.recipe.engine, " --actor.groups 0" if self.recipe.cluster.actor_nodes else ""
        return (
            f'python launch/actors.py --config {shlex.quote(self.paths.config)} --actor.learner "{learner}" \\\n'
            f'  --engine.host "{host}" --engine.port $(({engine.port} + {engine.count} * {number})){alone}'
        )

    def actors_command(self, learner: str) -> str:
        """Return the shell command of each host that has only actors: they play on the engines that the learner
        names."""
        config = shlex.quote(self.paths.config)
        return f'python launch/actors.py --config {config} --actor.learner "{learner}" --engine.count 0'

    def wait_for_learner(self, head: str) -> str:
        """Return shell lines that wait until the learner's port answers, since it may still load or be restarting; they
        exit with code 1 if it does not."""
        return f"""\
for ((second = 0; ; second++)); do
  (exec 3<>"/dev/tcp/{head}/{self.learner_port}") 2>/dev/null && break
  ((second < {FIND_S})) || {{ echo "no learner at {head}:{self.learner_port} for {FIND_S} s"; exit 1; }}
  sleep 1
done
"""

    def refuse_hours(self, scheduler: str) -> None:
        """Raise ConfigError if the recipe sets a time limit, which this scheduler does not have."""
        if hours := self.recipe.cluster.hours:
            raise ConfigError(f"cluster.hours = {hours:g}: {scheduler} has no time limits; set it to 0")


def layout(recipe: Recipe, folder: Path, paths: HostPaths | None = None) -> ClusterLayout:
    """Return a run's layout. Its recipe is changed as all hosts need it: paths of keys, addresses, and resuming after a
    restart of the learner. Raise ConfigError for engines that run already or share a GPU, and for a learner.bind
    without a port. Without `paths` all hosts share this host's file system."""
    paths = paths or HostPaths(f"{folder}/recipe.toml", f"{folder}/keys", recipe.run.dir, str(ROOT))
    bind = recipe.learner.bind
    port = bind.rpartition(":")[2]
    if not bind.startswith("tcp://") or not port.isdecimal():
        raise ConfigError(
            f"learner.bind = {bind!r}: actors on other hosts must know the port; write it as tcp://0.0.0.0:PORT"
        )
    learner = recipe.learner.model_copy(update={"bind": f"tcp://0.0.0.0:{port}", "resume": "auto"})
    changes = {
        "run": recipe.run.model_copy(update={"dir": paths.runs}),
        "learner": learner,
        "transport": recipe.transport.model_copy(update={"keys": paths.keys}),
        "engine": recipe.engine.model_copy(update={"api_key_file": f"{paths.keys}/engine.key"}),
    }
    if recipe.engine.urls:
        raise ConfigError(
            "engine.urls names engines that run already; on a cluster leave it out: engine hosts start them"
        )
    for field, value in {"engine.count": recipe.engine.count, "actor.groups": recipe.actor.groups}.items():
        if not value:
            raise ConfigError(
                f"{field} = 0 is for one host of several; on a cluster use cluster.actor_nodes, and leave it out"
            )
    if recipe.engine.shares_gpu:
        raise ConfigError(
            "engine.shares_gpu: on a cluster learner and engines have hosts of their own; set it to false, or train on "
            "one GPU with launch/local.py"
        )
    return ClusterLayout(recipe.model_copy(update=changes), folder, paths)


def cluster_folder(recipe: Recipe) -> Path:
    """Return the folder of scripts and keys: it is beside the run's folder, since a learner may rename that one."""
    return (Path(recipe.run.dir) / f"{recipe.run.name}.cluster").resolve()


def check_new(recipe: Recipe) -> None:
    """Raise ConfigError if the run's folder exists and learner.resume = 'never': on a cluster the learner always
    resumes."""
    run = Path(recipe.run.dir) / recipe.run.name
    if recipe.learner.resume == "never" and run.exists():
        raise ConfigError(
            f"the run {run} exists, and learner.resume = 'never': choose another --run.name, or go on with it with "
            "--learner.resume auto"
        )


def write(files: dict[str, str], made: ClusterLayout) -> None:
    """Write the scripts, and the recipe that they use. Raise ConfigError if the folder cannot be written."""
    try:
        (made.folder / "logs").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (made.folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {made.folder}: {error.strerror}; choose another --out") from None
    save_recipe(made.recipe, made.folder / "recipe.toml", "the recipe as the hosts of the cluster read it")


def make_missing_keys(folder: Path) -> Path:
    """Make the missing keys of the sockets and the engines, readable only by their owner; return their folder. Raise
    ValueError for existing keys that others can read."""
    keys = folder / "keys"
    make_keys(keys, ["actor"])
    make_api_key(keys)
    read_api_key(str(keys / "engine.key"))
    return keys


def call(*words: str, cure: str) -> str:
    """Run a cluster's client program and return its output. Raise ConfigError, in one line, if it is not installed,
    does not answer in time or fails."""
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]} is not on this host: {cure}")
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{shlex.join(words[:2])} has not answered in {CLIENT_TIMEOUT_S:g} s: {cure}") from None
    if ended.returncode:
        message = (ended.stderr.strip() or ended.stdout.strip()).rpartition("\n")[2][-400:]
        raise ConfigError(f"{shlex.join(words[:2])} failed: {message or f'exit code {ended.returncode}'}")
    return ended.stdout
