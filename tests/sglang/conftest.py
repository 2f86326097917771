"""Two servers for all tests of this folder: `make test-sglang`."""

from __future__ import annotations

import pytest

from launch.engines.network import free_port
from learner.distributed import close_ranks, init_ranks
from learner.model.policy import load_policy
from tests.support.publishing import publish_settings, publishing
from tests.support.sglang_rig import START_S, Servers, recipe_of, vision_of


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.timeout(START_S + 300))


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    fields = {"engine.count": 2, "engine.port": free_port(in_a_row=2), "engine.start_timeout_s": START_S}
    running = Servers.start(recipe_of(tmp_path_factory.mktemp("run"), **fields))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def recipe(servers):
    return servers.recipe


@pytest.fixture(scope="session")
def ranks():
    yield init_ranks("cpu")
    close_ranks()


@pytest.fixture
def policy(recipe):
    return load_policy(recipe.model.path, vision_of(recipe))


@pytest.fixture
def publisher(policy, ranks):
    settings = publish_settings(timeout_s=20.0, call_timeout_s=30.0, health_timeout_s=3.0)
    with publishing(policy, ranks, settings) as publisher:
        yield publisher
