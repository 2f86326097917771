"""Adapters that one rank and two (processes, FSDP2 over gloo) send alone; a run that does so, stopped and resumed."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from tests.support.publishing import held
from tests.support.ranks.weights import distance
from tests.support.runs import finished, local, metrics, places
from tests.support.tiny import running_engine, tiny_model_dir

pytestmark = pytest.mark.slow
DTYPES, SIZES = ("float32", "bfloat16"), (1, 2)


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_ranks):
    """(ranks, dtype) -> [first publication, that after a resumption], and what the engine then holds."""
    folder = tiny_model_dir(tmp_path_factory.mktemp("alone"), layers=3)
    with ExitStack() as stack:
        engines = {
            (size, dtype): stack.enter_context(running_engine(folder, dtype=dtype))
            for size in SIZES
            for dtype in DTYPES
        }
        told = [f"{size}={dtype}={url}" for (size, dtype), (url, _) in engines.items()]
        run_ranks("ranks.alone", folder, folder.parent, *told)
        found = {size: torch.load(folder.parent / f"{size}.pt", weights_only=False) for size in SIZES}
        yield {key: (found[key[0]][key[1]], held(app)) for key, (_, app) in engines.items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_engines_merge_to_the_bytes_that_a_merged_publication_of_the_ranks_sends(results, size, dtype):
    publications, engine = results[size, dtype]
    for publication in publications:
        told = publication["metrics"]
        assert (told["publish/engines"], told["publish/checksum_skipped"], told["publish/unproven"]) == (1, 0, 0)
        assert told["publish/bytes"] == publications[0]["metrics"]["publish/bytes"]
        assert all(torch.equal(engine[name], weight) for name, weight in publication["sums"].items())
    sums = publications[0]["sums"]
    assert publications[0]["metrics"]["publish/bytes"] < sum(p.nbytes for p in sums.values()) / 3


def test_two_ranks_send_the_adapter_of_one(results):
    one, two = (results[size, "float32"][0][0] for size in SIZES)
    assert one["metrics"]["publish/bytes"] == two["metrics"]["publish/bytes"]
    assert distance(two["sums"], one["sums"]) < 1e-6


@pytest.mark.usefixtures("forked_starts")
def test_a_run_that_sends_adapters_alone_is_stopped_and_resumed(tmp_path):
    fields = {"learner.checkpoint.every": 2, "learner.resume": "auto", "eval.samples": 0, "learner.lora.rank": 4}
    fields |= {"learner.lora.publish": "adapter", "learner.publish.pause_mode": "retract"}
    for steps in (2, 4):
        finished(local(places(tmp_path, **fields, **{"learner.total_steps": steps})))
    rows = [row for row in metrics(tmp_path) if "rollout/reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    gaps = [row["behaviour/logprob_gap/lag_0"] for row in rows if "behaviour/logprob_gap/lag_0" in row]
    assert gaps and max(gaps) < 1e-4
    proven = [row for row in metrics(tmp_path) if "publish/unproven" in row]
    assert proven and all(row["publish/checksum_skipped"] == row["publish/unproven"] == 0 for row in proven)
