"""The embedded engine on a GPU: its logprobs beside transformers' own on the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared.vision import VisionSpec
from tests.support.engines import check, play_at_once
from tests.support.small.families import FAMILIES
from tests.support.tiny import running_engine


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_many_episodes_at_once_equal_a_plain_forward_on_the_cpu(tmp_path, family):
    make, _, sides = FAMILIES[family]
    folder, sizes = make(tmp_path / "model"), [(a, b) for a in sides for b in sides]
    spec = VisionSpec.load(folder, min_pixels=784)
    with running_engine(folder, max_context=512, min_pixels=784, device="cuda") as (url, app):
        check(folder, spec, play_at_once(url, spec, range(20), temperature=0.7, pause_s=0.02, sizes=sizes), 0.7)
        assert app.scheduler.tokens_reused > app.scheduler.tokens_in / 4


def test_a_gpu_without_room_for_the_engine_is_told_in_one_line(tmp_path):
    folder = FAMILIES["Qwen3-VL"][0](tmp_path)
    command = [sys.executable, "-m", "actor.engine.server", "--model-path", folder, "--port", "0", "--device", "cuda"]
    command += ["--max-context", "262144", "--slots", "40000", "--mem-fraction", "0.5"]
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("engine: ")]
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "no room on the GPU" in line and "40000 slots" in line and "lower engine.max_batch" in line
