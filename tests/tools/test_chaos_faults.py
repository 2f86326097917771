"""What the chaos run does to checkpoints, connections, weights and steps is done, and is noticed."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from learner.checkpoints.trainer_state import SCHEMA
from learner.checkpoints.wholeness import DamagedCheckpoint, check_files, measured, read_meta, with_digest
from learner.distributed import Ranks
from learner.model.finite import check_finite
from tests.chaos import learner, sockets
from tests.chaos.disk import damage
from tests.chaos.faults import Faults
from tests.chaos.learner_faults import wrong_with
from tests.chaos.publisher import publish
from tests.chaos.report import went_on_from
from tests.support.engines import call
from tests.support.tiny import load_model, running_engine

mesh: Any = None
ALONE = Ranks(0, 1, torch.device("cpu"), mesh)
ECHO = """
import socket, sys
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while data := line.recv(100):
    line.sendall(data)
"""


def test_a_damaged_checkpoint_is_known_by_its_files(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for seed in range(20):
        path = checkpoints / f"step_{seed:08d}"
        (path / "dcp").mkdir(parents=True)
        files = [path / "dcp" / "__0_0.distcp", path / "dcp" / ".metadata"]
        for file in files:
            file.write_bytes(bytes(range(100)))
        meta = {"schema": SCHEMA, "files": measured(path, files)}
        (path / "meta.json").write_text(json.dumps(with_digest(meta), indent=1))
        check_files(path, read_meta(path, ALONE), ALONE)
        damage(path, random.Random(seed))
        with pytest.raises(DamagedCheckpoint):
            check_files(path, read_meta(path, ALONE), ALONE)


@pytest.mark.parametrize(
    ("steps", "right"), [([11, 12], True), ([9, 10, 11], True), ([16, 17], False), ([9, 10], None), ([], None)]
)
def test_a_run_goes_on_from_a_checkpoint_when_its_next_step_follows_it(
    tmp_path: Path, steps: list[int], right: bool | None
) -> None:
    ledger, before = tmp_path / "ledger.jsonl", '{"step": 15, "tickets": []}\n{"step": 16, "ti'
    lines = "".join(json.dumps({"step": step, "tickets": []}) + "\n" for step in steps)
    ledger.write_text(before + "\n" + lines)
    assert went_on_from(tmp_path / "step_00000010", ledger, len(before)) is right
    assert went_on_from(tmp_path / "step_00000010", tmp_path / "none", 0) is None


def test_a_second_learner_must_refuse_in_one_line(tmp_path: Path) -> None:
    said, line = tmp_path / "log", f"error: the run folder {tmp_path} is in use by the learner of process 7; stop it"
    for code, text, right in ((1, line, True), (0, line, False), (1, f"{line}\nmore", False), (1, "no port", False)):
        said.write_text(text + "\n")
        assert (wrong_with(code, said, tmp_path) == "") is right


def test_a_time_in_which_no_fault_is_possible_passes_and_an_unknown_one_is_named() -> None:
    system: Any = SimpleNamespace(disk=None)
    faults = Faults(system, 0, only=["second learner"])
    faults.faults = {"never": (1, lambda name: False), "once": (1, lambda name: not faults.injected)}
    faults.inject()
    faults.inject()
    assert faults.injected == {"once": 1}
    with pytest.raises(ValueError, match="there is no fault 'none such'"):
        Faults(system, 0, only=["none such"])


@pytest.mark.skipif(bool(sockets.trouble(os.getpid())), reason="no descriptors of other processes here")
def test_a_connection_of_another_process_is_silenced_released_and_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = subprocess.Popen([sys.executable, "-c", ECHO, str(listener.getsockname()[1])])
        own, _ = listener.accept()
    with own:
        own.settimeout(20.0)
        own.sendall(b"before")
        assert own.recv(100) == b"before"
        lines = sockets.between(other.pid, os.getpid())
        assert len(lines) == 1 == len(sockets.between(os.getpid(), other.pid))
        assert sockets.silence(lines) == 1
        own.sendall(b"meanwhile")
        own.settimeout(0.5)
        with pytest.raises(TimeoutError):
            own.recv(100)
        assert sockets.release(lines) == 1
        own.settimeout(20.0)
        assert own.recv(100) == b"meanwhile"
        assert sockets.cut(lines) == 1
        assert own.recv(100) == b""
        assert other.wait(20.0) == 0
        assert sockets.cut(lines) == 0  # it is gone


def test_a_stranger_rolls_an_engine_back_and_cannot_give_it_what_is_not_finite(folder: Path) -> None:
    weights = dict(load_model(folder).named_parameters())
    with running_engine(folder) as (url, _):
        assert publish(url, "7-mine", weights) == ""
        assert publish(url, "0-old", weights) == ""
        assert call(url, "/model_info")["weight_version"] == "0-old"
        with torch.no_grad():
            next(iter(weights.values())).view(-1)[0] = float("nan")
        assert "holds what is no finite number" in publish(url, "8-mine", weights)
        assert call(url, "/model_info")["weight_version"] == "0-old"
    assert "http://127.0.0.1:9" in publish("http://127.0.0.1:9", "8-mine", weights)


def test_a_flag_spoils_one_step_of_the_process_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAOS_FLAGS", str(tmp_path))
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    learner.flag(tmp_path, learner.NOT_FINITE, os.getpid() + 1).touch()
    learner.spoil_a_weight(optimizer)
    check_finite(layer.named_parameters(), ALONE)
    for fault in (learner.NOT_FINITE, learner.OUT_OF_MEMORY):
        learner.flag(tmp_path, fault, os.getpid()).touch()
    learner.spoil_a_weight(optimizer)
    with pytest.raises(ValueError, match="no finite number"):
        check_finite(layer.named_parameters(), ALONE)
    learner.ask_for_too_much(nn.ReLU())
    with pytest.raises(RuntimeError, match="memory"):
        learner.ask_for_too_much(layer)
    learner.ask_for_too_much(layer)
