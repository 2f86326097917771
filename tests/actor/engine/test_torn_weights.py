"""An engine that writes each bucket over its weights: whatever happens, nothing is sampled from a mixture under a name.

SGLang's server is such an engine where weights do not arrive beside generation, as on GPUs.
"""

from __future__ import annotations

import pytest

from shared.engine.engine_messages import UNTRAINED
from tests.support.engines import JoiningEngine, refuses, says
from tests.support.publishing import move, policy, publish_settings, publishing, served

__all__ = ["policy"]  # a fixture


class Overwriting(JoiningEngine):
    """Notes, after each request: whether it generates, what its weights are called, and whether they are whole."""

    def __init__(self, *, old=False):
        """`old`: a server that cannot change the name alone."""
        self.label, self.generates, self.whole, self.states = "1", True, True, []
        rename = says({"detail": "Not Found"}, 404) if old else self._on(self._rename)
        routes = {
            "/pause_generation": self._on(self._pause),
            "/continue_generation": self._on(self._resume),
            "/update_weight_version": rename,
            "/begin_weight_update": self._on(lambda body: None),
            "/end_weight_update": self._on(lambda body: None),
        }
        super().__init__(routes)

    def _on(self, change):
        def answer(request, body):
            change(body)
            self.states.append((self.generates, self.label, self.whole))
            says({"success": True})(request, body)

        return answer

    def _pause(self, body):
        self.generates = False

    def _resume(self, body):
        self.generates = True

    def _rename(self, body):
        assert body["abort_all_requests"] is False
        self.label = body["new_version"]

    def _take(self, body):
        self.whole = False
        super()._take(body)
        self.label = body.get("weight_version", self.label)
        self.whole = "model.language_model.norm.weight" in body["names"]  # the last parameter
        self.states.append((self.generates, self.label, self.whole))

    def sampled_from_a_mixture(self):
        return [state for state in self.states if state[0] and not state[2] and state[1] != UNTRAINED]


@pytest.fixture
def publisher(policy, ranks):
    with publishing(
        policy, ranks, publish_settings(timeout_s=3.0, call_timeout_s=2.0, health_timeout_s=1.0)
    ) as publisher:
        yield publisher


def refuses_the_third(answer):
    """The route of an engine that fails in the middle of an update, at its third bucket."""
    count = [0]

    def route(request, body):
        count[0] += 1
        (refuses if count[0] == 3 else answer)(request, body)

    return route


def test_weights_have_no_version_until_all_of_them_are_there(policy, publisher):
    engine = Overwriting()
    with engine as url:
        assert served(publisher.publish(2, [url])) == (1, 0)
    assert [label for _, label, _ in engine.states][1:-2] == [UNTRAINED] * (len(engine.states) - 3)
    assert engine.states[-2:] == [(False, "2", True), (True, "2", True)]


def test_after_a_failure_survivors_stay_paused_until_they_have_the_whole_and_the_failed_one_has_no_version(
    policy, publisher
):
    good, bad = Overwriting(), Overwriting()
    with good as good_url, bad as bad_url:
        bad.routes["/update_weights_from_distributed"] = refuses_the_third(bad._receive)
        move(policy, 0.01)
        assert served(publisher.publish(2, [good_url, bad_url])) == (1, 1)
    assert good.states[-1] == (True, "2", True) and good.sampled_from_a_mixture() == []
    assert bad.states[-1] == (True, UNTRAINED, False) and bad.sampled_from_a_mixture() == []
    resumed = [i for i, state in enumerate(good.states) if i and state[0]]
    assert resumed == [len(good.states) - 1]  # it generated at no moment between the two passes


def test_an_older_server_is_told_the_version_with_the_last_bucket(policy, publisher):
    engine = Overwriting(old=True)
    with engine as url:
        assert served(publisher.publish(2, [url])) == (1, 0)
    assert engine.states[-1] == (True, "2", True)
