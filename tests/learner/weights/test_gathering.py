"""A publication's buckets are whole on rank 0 alone, hold what one rank would send, and cost the bytes sent."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks.sent import MODES
from tests.support.small.families import qwen25
from tests.support.tiny import mixture_dir, tiny_model_dir

pytestmark = pytest.mark.slow
DTYPES = {"float32": 4, "bfloat16": 2}
OF_ONE = {
    "dealt": "experts",
    "dealt, replicas": "experts",
    "offloaded": "dense",
    "replicas": "dense",
    "to all": "dense",
}
EVERY = [(f"{mode}, {dtype}", size) for mode, (sizes, *_) in MODES.items() for size in sizes for dtype in DTYPES]


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_ranks):
    folder = tiny_model_dir(tmp_path_factory.mktemp("sent"), layers=2)
    mixture_dir(folder)
    qwen25(folder.parent / "windows")
    run_ranks("ranks.sent", folder, folder.parent)
    return {size: torch.load(folder.parent / f"{size}.pt", weights_only=False) for size in (1, 2, 3, 4)}


@pytest.mark.parametrize(("name", "size"), EVERY)
def test_what_is_sent_is_what_one_rank_sends_bit_for_bit(results, name, size):
    mode, dtype = name.rsplit(", ", 1)
    found, one = results[size][name], results[1][f"{OF_ONE.get(mode, mode)}, {dtype}"]["sent"]
    assert found["as whole parameters"]  # gathered in the dtype of training, cast afterwards
    assert found["sent"].keys() == one.keys() and one
    assert all(tensor.dtype == getattr(torch, dtype) for tensor in found["sent"].values())
    assert all(torch.equal(tensor, one[name]) for name, tensor in found["sent"].items())


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, size in EVERY if size > 1])
def test_each_bucket_costs_one_collective_of_the_bytes_that_are_sent(results, name, size):
    mode, dtype = name.rsplit(", ", 1)
    found, itemsize = results[size][name], DTYPES[dtype]
    num_values = sum(tensor.numel() for tensor in found["sent"].values())
    assert len(found["gathered"]) == found["buckets"]
    if "adapters" in mode or mode == "windows" or size == 3:  # factors travel too; what does not divide is filled up
        assert itemsize * num_values <= sum(found["gathered"]) < 1.2 * itemsize * num_values
    else:
        assert sum(found["gathered"]) == itemsize * num_values


def test_one_rank_gathers_nothing_and_replicas_of_rank_0s_take_no_part(results):
    assert not any(found["gathered"] for name, found in results[1].items() if ", " in name)
    for name in ("replicas, bfloat16", "dealt, replicas, bfloat16"):
        counts = [of_rank[name] for of_rank in results[4]["collectives of ranks"]]
        assert counts[0] == counts[1] > 0 == counts[2] == counts[3]


def test_tensors_of_several_dtypes_are_gathered_in_one_row(results):
    (odd, odd_values), (name, values) = results[2]["two dtypes"]
    assert (odd, name) == ("odd", "float32")
    assert odd_values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and odd_values.dtype == torch.bfloat16
    assert values.tolist() == [10.0, 11.0, 12.0, 13.0] and values.dtype == torch.float32
