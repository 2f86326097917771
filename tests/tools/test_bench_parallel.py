"""The benchmarks of a publication to many engines say at once what they cannot do or whom they wait for."""

from __future__ import annotations

import pytest

from tests.bench.parallel import gathering, publish_many


@pytest.mark.parametrize(("flag", "value", "least"), [("--ranks", "1", 2), ("--rounds", "0", 1)])
def test_a_gathering_that_would_measure_nothing_is_refused_in_one_line(capsys, flag, value, least):
    assert gathering.main([flag, value]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1 and f"{flag} is {value}: " in said.err
    assert f"give at least {least}" in said.err


@pytest.mark.slow
def test_simulated_engines_that_die_at_the_start_are_named(monkeypatch):
    monkeypatch.setattr(publish_many, "serve_many", divmod)  # fails in the child, whatever it is given
    with pytest.raises(RuntimeError, match="the 3 simulated engines ended before it told their ports"):
        publish_many.started(3)


@pytest.mark.slow
def test_simulated_engines_that_say_nothing_in_time_are_named():
    with pytest.raises(RuntimeError, match="the 3 simulated engines has not told their ports within 0 s"):
        publish_many.started(3, limit_s=0.0)
