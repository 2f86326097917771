"""SGLang's server computes a GLM's positions for all tokens of a prompt, whatever its processor's mask covers."""

from __future__ import annotations

import importlib

import pytest
import torch

from launch.engines.kinds.sglang_engine import PLUGIN

IDS = torch.arange(12)[None]


@pytest.mark.parametrize(("mask", "given"), [(torch.ones(1, 7), False), (torch.ones(1, 12), True), (None, False)])
def test_a_mask_of_another_length_than_the_tokens_is_left_out(monkeypatch, mask, given):
    monkeypatch.syspath_prepend(PLUGIN)
    plugin = importlib.import_module("pronk_whole_positions")
    seen = []

    def original(*args, **kwargs):
        seen.append((args, kwargs))
        return "positions"

    for args, named in (((IDS,), {}), ((), {"input_ids": IDS})):
        assert plugin.positions(original, *args, attention_mask=mask, grids=5, **named) == "positions"
        assert seen.pop() == (args, {"grids": 5, "attention_mask": mask if given else None, **named})
