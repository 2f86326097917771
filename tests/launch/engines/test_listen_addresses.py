"""Engines listen where the learner reaches them, or the recipe is refused in one line."""

from __future__ import annotations

import socket

import pytest

from launch.engines.host_engines import engine_specs
from launch.engines.network import check_ports, check_reach
from shared.config.recipe import ConfigError, load_recipe

ELSEWHERE = "192.0.2.7"  # an address of the documentation network: of no machine


def recipe(**fields):
    arguments = [str(part) for key, value in fields.items() for part in (f"--{key.replace('__', '.')}", value)]
    return load_recipe("launch/recipes/colour_tiny.toml", arguments)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"engine__host": ELSEWHERE}, r"is not loopback; set engine\.api_key_file"),
        ({"engine__host": "0.0.0.0", "engine__api_key_file": "k"}, "name the address by which the learner reaches"),
        ({"actor__learner": f"tcp://{ELSEWHERE}:5555"}, r"is another host.*set engine\.host"),
    ],
)
def test_engines_that_the_learner_could_not_reach_or_anybody_could_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        check_reach(recipe(**fields))


@pytest.mark.parametrize("learner", ["tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://no.such.host.invalid:5555"])
def test_a_learner_on_this_host_or_nowhere_is_no_reason_to_refuse(learner):
    check_reach(recipe(actor__learner=learner))


def test_a_learner_on_another_host_is_served_on_this_hosts_address():
    fields = {"engine__host": ELSEWHERE, "engine__api_key_file": "k", "actor__learner": "tcp://192.0.2.8:5555"}
    check_reach(recipe(**fields))


def test_an_address_of_another_machine_is_named():
    with pytest.raises(ConfigError, match="no address of this machine"):
        check_ports(recipe(engine__host=ELSEWHERE))
    with pytest.raises(ConfigError, match="no address of this machine"):
        check_ports(recipe(engine__host="no.such.host.invalid"))


def test_a_port_is_occupied_only_on_the_address_that_is_asked_for():
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        check_ports(recipe(engine__host="127.0.0.3", engine__port=port))
        with pytest.raises(ConfigError, match=f"port {port} is occupied"):
            check_ports(recipe(engine__host="127.0.0.2", engine__port=port))


def test_engines_are_told_and_named_by_their_address():
    (spec,) = engine_specs(recipe(engine__host="127.0.0.2", engine__port=40000))
    assert spec.url == "http://127.0.0.2:40000"
    assert spec.command[spec.command.index("--host") + 1] == "127.0.0.2"
    (spec,) = engine_specs(recipe(engine__host="::1", engine__port=40000))
    assert spec.url == "http://[::1]:40000"
