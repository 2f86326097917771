"""Other ranks of rank 0's host in the weight group: engines get the same, and one that fails is left out."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
import torch

from learner.distributed import Ranks
from learner.weights.companions import Companion, companions_of
from shared.engine_api import EngineClient, EngineError
from tests.support.publishing import held, served
from tests.support.ranks.accompanied import RANKS, SENDERS
from tests.support.tiny import running_engine

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_engines_get_their_weights_with_companions_and_after_one_of_these_has_failed(folder, tmp_path):
    with running_engine(folder, update_timeout_s=20.0) as (url, app):
        command = [
            sys.executable,
            "-m",
            "tests.support.ranks.accompanied",
            str(folder),
            str(tmp_path / "found.pt"),
            url,
        ]
        ended = subprocess.run(command, cwd=ROOT, text=True, stdout=PIPE, stderr=STDOUT, timeout=200)
        assert ended.returncode == 0, ended.stdout[-3000:]
        found = torch.load(tmp_path / "found.pt", weights_only=False)
        assert [served(metrics) for metrics in found["metrics"]] == [(1, 0)] * 6
        for name, values in found["weights"].items():
            assert torch.equal(held(app)[name].flatten(), values), name
    nobody, well, failed, beyond = found["received"]
    assert len(found["received"]) == RANKS == SENDERS + 1
    assert nobody == beyond == 0  # rank 0 sends, and the fourth rank is none of the senders
    assert failed == 4 * found["buckets"] and well > 6 * found["buckets"]  # a bucket was sent again, without the other


def test_a_companion_answers_nobody_but_rank_0():
    companion = Companion(1, 0, 5.0, "secret")

    async def ask(key: str) -> None:
        async with EngineClient(f"http://127.0.0.1:{companion.port}", api_key=key) as client:
            await client.health()

    asyncio.run(ask("secret"))
    for key in ("", "other"):
        with pytest.raises(EngineError, match="401"):
            asyncio.run(ask(key))
    companion.close()


def test_one_sender_or_one_rank_has_no_companions(ranks: Ranks):
    assert companions_of(ranks, 1, 5.0) == companions_of(ranks, 8, 5.0) == (None, (), "")
