"""Which hosts a run has on a cluster, what each of them calls, and where its scripts, keys and logs lie."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from launch.processes.children import ROOT
from launch.task_run.recipe_file import save
from shared.config import ConfigError, Recipe
from shared.keys import make_api_key, make_keys, read_api_key

CLIENT_TIMEOUT_S = 60.0
FIND_S = 600  # a host with engines or actors looks for the learner
_JOB_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Seen:
    """Where the hosts find what the run needs."""

    config: str
    keys: str
    runs: str
    project: str


# Of hosts that see nothing of this one, and get all that they need.
CONTAINER = Seen("/pronk/config/recipe.toml", "/pronk/keys", "/pronk/runs", "/opt/pronk")


@dataclass(frozen=True, slots=True)
class Layout:
    """A run's hosts. `folder`, which they may not see, has scripts or manifests, the recipe and keys."""

    recipe: Recipe
    folder: Path
    seen: Seen

    @property
    def job(self) -> str:
        """The run's name as schedulers take it. ConfigError if little is left of it."""
        name = re.sub(r"[^a-z0-9]+", "-", self.recipe.run.name.lower()).strip("-")
        if not _JOB_NAME.fullmatch(name):
            raise ConfigError(f"run.name = {self.recipe.run.name!r}: on a cluster use up to 40 letters, digits and '-'")
        return f"pronk-{name}"

    @property
    def learner_gpus(self) -> int:
        """Of one host."""
        return self.recipe.cluster.gpus_per_node if self.recipe.learner.device == "cuda" else 0

    @property
    def engine_gpus(self) -> int:
        return self.recipe.cluster.gpus_per_node if self.recipe.engine.device == "cuda" else 0

    @property
    def learner_port(self) -> int:
        return int(self.recipe.learner.bind.rpartition(":")[2])

    @property
    def learner_leave_s(self) -> int:
        """Between the signal to leave and the end by force: the learner ends its step and writes a checkpoint."""
        return round(self.recipe.learner.leave_timeout_s) + 30

    def learner_command(self, head: str) -> str:
        """What each learner host calls, in shell; `head` is the shell's word for the first one's address."""
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
            f"  launch/learner.py --config {shlex.quote(self.seen.config)}"
        )

    def engines_command(self, learner: str, host: str, number: str) -> str:
        """What each engine host calls; the arguments are the shell's words for the learner's address, the host's own,
        and its number, which keeps two of them apart on one machine."""
        engine, alone = self.recipe.engine, " --actor.groups 0" if self.recipe.cluster.actor_nodes else ""
        return (
            f'python launch/actors.py --config {shlex.quote(self.seen.config)} --actor.learner "{learner}" \\\n'
            f'  --engine.host "{host}" --engine.port $(({engine.port} + {engine.count} * {number})){alone}'
        )

    def actors_command(self, learner: str) -> str:
        """What each host with actors alone calls: their engines are those that the learner names."""
        config = shlex.quote(self.seen.config)
        return f'python launch/actors.py --config {config} --actor.learner "{learner}" --engine.count 0'

    def wait_for_learner(self, head: str) -> str:
        """Shell lines that end with code 1 if nobody answers there; the learner may still load, or start again."""
        return f"""\
for ((second = 0; ; second++)); do
  (exec 3<>"/dev/tcp/{head}/{self.learner_port}") 2>/dev/null && break
  ((second < {FIND_S})) || {{ echo "no learner at {head}:{self.learner_port} for {FIND_S} s"; exit 1; }}
  sleep 1
done
"""

    def refuse_hours(self, scheduler: str) -> None:
        """ConfigError for a time limit, which this scheduler does not know."""
        if hours := self.recipe.cluster.hours:
            raise ConfigError(f"cluster.hours = {hours:g}: {scheduler} has no time limits; set it to 0")


def layout(recipe: Recipe, folder: Path, seen: Seen | None = None) -> Layout:
    """`recipe` with what holds on every host: keys, addresses, that a learner which starts again goes on. ConfigError
    for engines that run already or share a GPU, and for a bind that names no port. Without `seen` all hosts share this
    one's file system."""
    seen = seen or Seen(f"{folder}/recipe.toml", f"{folder}/keys", recipe.run.dir, str(ROOT))
    bind = recipe.learner.bind
    port = bind.rpartition(":")[2]
    if not bind.startswith("tcp://") or not port.isdecimal():
        raise ConfigError(
            f"learner.bind = {bind!r}: actors on other hosts must know the port; write it as tcp://0.0.0.0:PORT"
        )
    learner = recipe.learner.model_copy(update={"bind": f"tcp://0.0.0.0:{port}", "resume": "auto"})
    changes = {
        "run": recipe.run.model_copy(update={"dir": seen.runs}),
        "learner": learner,
        "transport": recipe.transport.model_copy(update={"keys": seen.keys}),
        "engine": recipe.engine.model_copy(update={"api_key_file": f"{seen.keys}/engine.key"}),
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
    return Layout(recipe.model_copy(update=changes), folder, seen)


def cluster_folder(recipe: Recipe) -> Path:
    """Beside the run's folder, which a learner may move aside."""
    return (Path(recipe.run.dir) / f"{recipe.run.name}.cluster").resolve()


def check_new(recipe: Recipe) -> None:
    """ConfigError if a run that is not to be resumed has a folder already: it would be resumed at every restart."""
    run = Path(recipe.run.dir) / recipe.run.name
    if recipe.learner.resume == "never" and run.exists():
        raise ConfigError(
            f"the run {run} exists, and learner.resume = 'never': choose another --run.name, or go on with it with "
            "--learner.resume auto"
        )


def write(files: dict[str, str], made: Layout) -> None:
    """The scripts, and the recipe that they name. ConfigError if the folder cannot be written."""
    try:
        (made.folder / "logs").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (made.folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {made.folder}: {error.strerror}; choose another --out") from None
    save(made.recipe, made.folder / "recipe.toml", "the recipe as the hosts of the cluster read it")


def make_missing_keys(folder: Path) -> Path:
    """Keys of the sockets and the engines, readable by their owner alone. ValueError for some that others can read."""
    keys = folder / "keys"
    make_keys(keys, ["actor"])
    make_api_key(keys)
    read_api_key(str(keys / "engine.key"))
    return keys


def call(*words: str, cure: str) -> str:
    """What a cluster's client prints. ConfigError, in one line, if it is missing, silent or refuses."""
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]} is not on this host: {cure}")
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{shlex.join(words[:2])} has not answered in {CLIENT_TIMEOUT_S:g} s: {cure}") from None
    if ended.returncode:
        said = (ended.stderr.strip() or ended.stdout.strip()).rpartition("\n")[2][-400:]
        raise ConfigError(f"{shlex.join(words[:2])} failed: {said or f'exit code {ended.returncode}'}")
    return ended.stdout
