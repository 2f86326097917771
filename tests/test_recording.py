"""Recorded groups come back as they were, and what is none is named."""

from __future__ import annotations

import numpy as np
import pytest
from episodes import random_groups

from shared.recording import Recorder, files, recorded
from shared.vision import VisionSpec
from tiny import tiny_model_dir


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    spec = VisionSpec.load(tiny_model_dir(tmp_path_factory.mktemp("model")), min_pixels=1024, max_pixels=1 << 20)
    return random_groups(spec, 3, group_size=2)


def test_groups_come_back_in_order_and_a_second_recorder_goes_on_behind_them(groups, tmp_path):
    Recorder(tmp_path).add(groups[0])
    again = Recorder(tmp_path)
    for group in groups[1:]:
        again.add(group)
    back = list(recorded(tmp_path))
    assert [g.ticket_id for g in back] == [g.ticket_id for g in groups]
    for got, expected in zip(back, groups, strict=True):
        for a, b in zip(got.trajectories, expected.trajectories, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids) and a.images == b.images and a.turns == b.turns


def test_a_file_that_is_no_group_is_named(groups, tmp_path):
    Recorder(tmp_path).add(groups[0])
    (tmp_path / "00000001.group").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"00000001\.group is no recorded group"):
        list(recorded(tmp_path))
    assert len(files(tmp_path)) == 2 and list(recorded(tmp_path / "none")) == []
