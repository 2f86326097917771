"""What many tests start from: a tiny model's folder, its vision settings, and one learner rank in this process."""

from __future__ import annotations

import pytest

from learner.distributed import close_ranks, init_ranks
from shared.vision import VisionSpec
from tests.support.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def spec(folder):
    return VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20)


@pytest.fixture(scope="module")
def ranks():
    yield init_ranks("cpu")
    close_ranks()
