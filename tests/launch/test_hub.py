"""Datasets and models by hub name, with the real client and a small hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.datasets import load_dataset
from envs.geometry.triangles import rows
from envs.row_files import write_rows
from tests.support.machine import LocalServer, QuietHandler
from tests.support.tiny import tiny_model_dir

COMMIT = "1" * 40


class Hub(LocalServer):
    """Serves the files of folders as repositories: {"datasets/ORG/NAME": folder}. `asked` are the files downloaded."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.asked: list[str] = []
        hub = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                for name, folder in repositories.items():
                    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
                    if self.path.startswith(f"/api/{name}/revision/"):
                        files = [{"rfilename": n} for n in names]
                        return self.say({"id": name.partition("/")[2], "sha": COMMIT, "siblings": files})
                    if self.path.startswith(f"/api/{name}/tree/"):
                        files = [{"path": n, "size": (folder / n).stat().st_size} for n in names]
                        return self.say([{"type": "file", "oid": COMMIT, **file} for file in files])
                    prefix = f"/{name.removeprefix('models/')}/resolve/{COMMIT}/"
                    if self.path.startswith(prefix):
                        if self.command == "GET":
                            hub.asked.append(self.path.removeprefix(prefix))
                        return self.file((folder / self.path.removeprefix(prefix)).read_bytes())
                return self.reply(b"{}", 404)

            do_HEAD = do_GET

            def say(self, answer: object) -> None:
                self.file(json.dumps(answer).encode())

            def file(self, data: bytes) -> None:
                etag = f'"{hashlib.sha256(data).hexdigest()}"'
                self.reply(data, headers={"etag": etag, "x-repo-commit": COMMIT})

        super().__init__(Handler)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    data = tmp_path / "served" / "data"
    write_rows(data / "train-00000-of-00001.parquet", rows(12, "train"))
    write_rows(data / "test-00000-of-00001.parquet", rows(3, "heldout"))
    (data / "picture.bin").write_bytes(b"not needed")
    server = Hub(
        {"datasets/VeraIsHere/geo3k_imgurl_processed": data.parent, "models/us/tiny": tiny_model_dir(tmp_path)}
    )
    yield server
    server.close()


def run(tmp_path: Path, hub: Hub, code: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "no_proxy": "*"}
    return subprocess.run([sys.executable, *code], capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_downloaded_with_its_own_split(tmp_path: Path, hub: Hub) -> None:
    out = tmp_path / "out"
    ended = run(tmp_path, hub, ["launch/prepare.py", "geo3k_multi_turn", "--out", str(out)])
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "12 to train on, 3 held out" in ended.stdout
    assert len(load_dataset(out / "heldout.parquet").samples) == 3
    assert sorted(hub.asked) == ["data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"]


@pytest.mark.slow
def test_a_dataset_that_the_hub_does_not_have_is_one_line(tmp_path: Path, hub: Hub) -> None:
    ended = run(tmp_path, hub, ["launch/prepare.py", "sokoban", "--out", str(tmp_path / "out")])
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line.lower()]
    assert line.startswith(
        "error: dataset 'VeraIsHere/sokoban_processed' cannot be downloaded; give a file with --from"
    )


@pytest.mark.slow
def test_a_model_goes_into_a_folder_where_what_is_missing_is_fetched_and_nothing_twice(tmp_path, hub: Hub) -> None:
    place = tmp_path / "models" / "tiny"
    code = "import sys; from launch.task_run.downloads import fetch; fetch('us/tiny', sys.argv[1])"
    for missing in (None, "model.safetensors"):
        if missing:
            (place / missing).unlink()
            hub.asked.clear()
        ended = run(tmp_path, hub, ["-c", code, str(place)])
        assert ended.returncode == 0, ended.stderr[-2000:]
    assert (place / "model.safetensors").exists() and hub.asked == ["model.safetensors"]


@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_once(tmp_path: Path, hub: Hub) -> None:
    imports = "from launch.hub import local_model; from shared.vision import VisionSpec"
    code = f"{imports}; print(VisionSpec.load(local_model('us/tiny')))"
    for _ in range(2):
        ended = run(tmp_path, hub, ["-c", code])
        assert ended.returncode == 0, ended.stderr[-2000:]
        assert "patch_size=16" in ended.stdout
    assert sorted(hub.asked) == sorted(set(hub.asked))
    assert {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"} <= set(hub.asked)
