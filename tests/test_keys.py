"""Key files: who may read them, what a damaged one says, and that no socket off loopback is plain by accident."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.keys import actor_security, is_local, learner_security, main, make_keys
from shared.sections import TransportConfig

PUBLIC = "tcp://0.0.0.0:5555"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    assert main([str(folder), "--actors", "actor", "farm-b"]) == 0
    return folder


def test_key_files_are_for_their_owner_alone(keys: Path) -> None:
    assert {path.name for path in keys.iterdir()} == {"learner.key", "actor.key", "farm-b.key", "allowed"}
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}


def test_an_actor_can_be_added_and_no_key_is_made_anew(keys: Path) -> None:
    before = {path.name: path.read_text() for path in keys.iterdir()}
    assert [path.name for path in make_keys(keys, ["actor", "farm-c"])] == ["farm-c.key"]
    after = {path.name: path.read_text() for path in keys.iterdir()}
    assert after["allowed"].startswith(before.pop("allowed")) and "farm-c" in after["allowed"]
    assert before.items() <= after.items()


def test_secrets_are_not_shown_by_repr(keys: Path) -> None:
    secret = (keys / "actor.key").read_text().split('secret = "')[1][:40]
    assert secret not in repr(actor_security(TransportConfig(keys=str(keys)), PUBLIC))


@pytest.mark.parametrize("name", ["../evil", "", "a b", "learner", "allowed", "x" * 65])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "keys"), "--actors", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "[::1]", "localhost"])
def test_loopback_is_plain_without_keys(host: str) -> None:
    assert is_local(f"tcp://{host}:5555")
    assert learner_security(TransportConfig(), f"tcp://{host}:5555") is None


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "eth0", "10.0.0.1", "[::]", "localhost.evil.org", "127.0.0.1.evil.org"]
)
def test_a_plain_socket_off_loopback_is_refused_unless_allowed(host: str) -> None:
    for security, field in ((learner_security, "learner.bind"), (actor_security, "actor.learner")):
        with pytest.raises(ValueError, match=rf"{field} = .*shared\.keys.*allow_plain") as caught:
            security(TransportConfig(), f"tcp://{host}:5555")
        assert "\n" not in str(caught.value)
        assert security(TransportConfig(allow_plain=True), f"tcp://{host}:5555") is None


def mistake(match: str, keys: Path, security: Callable = actor_security, address: str = PUBLIC, **transport) -> None:
    """The socket is refused, in one line."""
    with pytest.raises(ValueError, match=match) as caught:
        security(TransportConfig(keys=str(keys), **transport), address)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("learner.key", 0o622), ("learner.key", 0o640), ("allowed", 0o622), ("allowed", 0o666), ("actor.key", 0o640)],
)
def test_a_file_open_to_others_is_one_line_with_its_cure(keys: Path, name: str, mode: int) -> None:
    (keys / name).chmod(mode)
    security = actor_security if name == "actor.key" else learner_security
    mistake(rf"{name} is open to others .*{mode:04o}.*chmod", keys, security)


def test_a_missing_file_is_one_line(keys: Path) -> None:
    mistake(r"cannot read .*nobody\.key: No such file.*shared\.keys", keys, key_name="nobody")
    mistake("cannot read", keys / "elsewhere", learner_security)


@pytest.mark.parametrize(
    "text", ["", "nonsense", "public = 1\nsecret = 2", 'public = "short"\nsecret = "short"', "\u00e9", "x = [" * 999]
)
def test_a_damaged_key_file_is_one_line(keys: Path, text: str) -> None:
    (keys / "actor.key").write_text(text)
    mistake(r"actor\.key", keys)


def test_a_public_key_that_is_of_another_secret_is_noticed(keys: Path) -> None:
    mine, other = (keys / "actor.key").read_text(), (keys / "farm-b.key").read_text()
    (keys / "actor.key").write_text(mine.splitlines()[0] + "\n" + "\n".join(other.splitlines()[1:]))
    mistake("does not belong to its secret", keys)


@pytest.mark.parametrize("line", ["short name", "a" * 40, "a" * 40 + " bad/name"])
def test_a_bad_line_of_the_allow_list_names_its_number(keys: Path, line: str) -> None:
    (keys / "allowed").write_text((keys / "allowed").read_text() + line + "\n")
    mistake("allowed, line 3", keys, learner_security)


def test_an_allow_list_of_nobody_is_refused(keys: Path) -> None:
    (keys / "allowed").write_text("\n")
    mistake("names no actor", keys, learner_security)
