"""Key files: who may read them, what a damaged one says, and that no socket off loopback is plain by accident."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.config.sections import TransportConfig
from shared.keys import actor_keys, is_local, learner_keys, main, make_keys, read_allowed
from shared.log import get_logger
from shared.wire import endpoints
from shared.wire.endpoints import AllowList

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
    assert secret not in repr(actor_keys(TransportConfig(keys=str(keys)), PUBLIC))


@pytest.mark.parametrize("name", ["../evil", "", "a b", "learner", "allowed", "x" * 65])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "keys"), "--actors", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "[::1]", "localhost"])
def test_loopback_is_plain_without_keys(host: str) -> None:
    assert is_local(f"tcp://{host}:5555")
    assert learner_keys(TransportConfig(), f"tcp://{host}:5555") is None


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "eth0", "10.0.0.1", "[::]", "localhost.evil.org", "127.0.0.1.evil.org"]
)
def test_a_plain_socket_off_loopback_is_refused_unless_allowed(host: str) -> None:
    for security, field in ((learner_keys, "learner.bind"), (actor_keys, "actor.learner")):
        with pytest.raises(ValueError, match=rf"{field} = .*shared\.keys.*allow_plain") as caught:
            security(TransportConfig(), f"tcp://{host}:5555")
        assert "\n" not in str(caught.value)
        assert security(TransportConfig(allow_plain=True), f"tcp://{host}:5555") is None


def mistake(match: str, keys: Path, security: Callable = actor_keys, address: str = PUBLIC, **transport) -> None:
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
    security = actor_keys if name == "actor.key" else learner_keys
    mistake(rf"{name} is open to others .*{mode:04o}.*chmod", keys, security)


def test_a_missing_file_is_one_line(keys: Path) -> None:
    mistake(r"cannot read .*nobody\.key: No such file.*shared\.keys", keys, key_name="nobody")
    mistake("cannot read", keys / "elsewhere", learner_keys)


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
    mistake("allowed, line 3", keys, learner_keys)


def test_an_allow_list_of_nobody_is_refused(keys: Path) -> None:
    (keys / "allowed").write_text("\n")
    mistake("names no actor", keys, learner_keys)


def test_a_folder_that_cannot_be_made_is_one_line_with_its_name(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "keys")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"no keys can be made in '{tmp_path / 'file' / 'keys'}'" in line and "name a folder" in line


# ------------------------------------------------------------------ the allow-list of a learner that runs


@pytest.fixture
def allowed(keys: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, AllowList]:
    monkeypatch.setattr(endpoints, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(get_logger("auth"), "propagate", True)
    path = keys / "allowed"
    path.write_text(path.read_text().splitlines(True)[0])  # one actor
    return path, AllowList(path, read_allowed)


def write(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("text", ["", "\n \n", None, "a folder"], ids=["emptied", "blank lines", "removed", "a folder"])
def test_the_last_key_can_be_revoked(allowed, caplog: pytest.LogCaptureFixture, text: str | None) -> None:
    path, allow_list = allowed
    before = path.read_text()
    assert len(allow_list.keys) == 1
    if text is None or text == "a folder":
        path.unlink()
        if text:
            path.mkdir()
    else:
        write(path, text)
    for _ in range(3):
        allow_list.refresh()
    assert allow_list.keys == {}
    assert caplog.text.count("the allow-list lets nobody in") == 1
    if path.is_dir():
        path.rmdir()
    write(path, before)
    allow_list.refresh()
    assert list(allow_list.keys.values()) == ["actor"]  # and comes back without a restart


@pytest.mark.parametrize("cut", [1, 20, 41])
def test_a_half_written_list_changes_nothing_until_it_is_whole(allowed, caplog, cut: int) -> None:
    path, allow_list = allowed
    before, keys = path.read_text(), dict(allow_list.keys)
    write(path, before[:cut])
    for _ in range(3):
        allow_list.refresh()
    assert allow_list.keys == keys
    assert caplog.text.count("the allow-list stays as it was until it can be read as a whole") == 1


def test_a_list_that_others_may_write_lets_nobody_in(allowed) -> None:
    path, allow_list = allowed
    write(path, path.read_text())
    path.chmod(0o666)
    allow_list.refresh()
    assert allow_list.keys == {}
