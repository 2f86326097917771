"""Recordings of a step: what is written is read, also from files that were cut off, damaged, or made up."""

from __future__ import annotations

import os
import shutil
import struct
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from shared.recordings.episode_format import Array, ImageRef, RecordedEpisode, RecordedTurn, StepHeader, StepImages
from shared.recordings.reader import (
    FRAME,
    START,
    RecordingError,
    RecordingId,
    decode,
    episodes,
    image_names,
    read_episode,
    read_image,
    read_step,
    recordings,
    steps,
)
from shared.recordings.writer import StepWriter
from shared.types import Ending

IMAGE = ImageRef(hash=xxhash.xxh3_128_hexdigest(b"an image"), format="png", width=64, height=32, bytes=8, tokens=2)


def episode(index: int = 0, **changes) -> RecordedEpisode:
    mask = np.array([0, 0, 0, 1, 1, 0, 1], dtype=np.uint8)
    values = {
        "ticket_id": "7-abc",
        "index": index,
        "token_ids": Array.of(np.arange(7, dtype=np.int32)),
        "loss_mask": Array.of(mask),
        "behaviour_logprobs": Array.of(np.where(mask, -1.0, 0).astype(np.float32)),
        "policy_versions": Array.of(np.where(mask, [0, 0, 0, 3, 3, 0, 4], -1).astype(np.int32)),
        "pieces": tuple("abcdefg"),
        "turns": (
            RecordedTurn(start=3, end=5, reward=0.5, seen="abc", answer="de", last_image=1, generate_s=2.0, env_s=0.5),
            RecordedTurn(start=6, end=7, reward=1.0, begin_s=3.0, generate_s=1.0, info='{"moved":true}'),
        ),
        "images": (IMAGE,),
        "reward": 1.5,
        "columns": {
            "logprob": Array.of(np.array([-1.0, -1.5, -0.75], dtype=np.float32)),
            "clipped": Array.of(np.array([0, 1, 0], dtype=np.uint8)),
        },
    }
    return RecordedEpisode(**values | changes)


def write(folder: Path, count: int = 3, step: int = 12) -> Path:
    writer = StepWriter(folder, StepHeader(step=step, version=11, time=1.0), StepImages(names=(IMAGE.file_name,)))
    for index in range(count):
        writer.add(episode(index))
    writer.close()
    return writer.path


def same(a: RecordedEpisode, b: RecordedEpisode) -> bool:
    return msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


def test_what_is_written_is_read_with_arrays_in_place(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert steps(tmp_path) == [path] and steps(tmp_path / "none") == []
    read = read_step(path)
    assert read.header.step == 12 and read.damages == () and image_names(path) == (IMAGE.file_name,)
    assert [summary.id for summary in read.summaries] == ["7-abc/0", "7-abc/1", "7-abc/2"]
    for index, summary in enumerate(read.summaries):
        back = read.episode(summary)
        assert same(back, episode(index))
        assert back.token_ids.numpy().tolist() == list(range(7)) and not back.token_ids.numpy().flags.owndata
        assert back.columns["clipped"].numpy().tolist() == [0, 1, 0]
    summary = read.summaries[0]
    assert (summary.tokens, summary.turns, summary.images, summary.expanded) == (3, 2, 1, 8)
    assert (summary.oldest, summary.newest, summary.trained, summary.failed) == (3, 4, True, False)
    assert (summary.seconds, summary.generate_s, summary.env_s) == (4.0, 3.0, 0.5)
    assert (summary.max_gap, summary.mean_gap) == (0.5, 0.25)


def flip(path: Path, place: int) -> None:
    """Changes one byte in place; a second time changes it back."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 0x55]))


def test_a_recording_that_is_cut_off_at_any_byte_is_read_up_to_there(tmp_path: Path) -> None:
    path = write(tmp_path)
    summaries, index = read_step(path).summaries, path.with_suffix(".idx")
    ends = [summary.offset + summary.length for summary in summaries]
    first, sizes = summaries[0].offset - FRAME.size, (path.stat().st_size, index.stat().st_size)
    for size in reversed(range(sizes[0])):
        os.truncate(path, size)
        os.truncate(index, size * sizes[1] // sizes[0])
        if size < first:
            with pytest.raises(RecordingError, match=r"step_00000012\.rec"):
                read_step(path)
            continue
        read = read_step(path)
        assert len(read.summaries) == sum(end <= size for end in ends)
        assert len(read.damages) == (size not in (first, *ends))
        assert all(same(read.episode(summary), episode(i)) for i, summary in enumerate(read.summaries))


@pytest.mark.slow
def test_an_index_that_is_cut_off_or_damaged_at_any_byte_costs_no_episode(tmp_path: Path) -> None:
    path = write(tmp_path)
    index, expected = path.with_suffix(".idx"), read_step(path).summaries
    for place in range(index.stat().st_size):
        flip(index, place)
        assert read_step(path).summaries == expected
        flip(index, place)
    for size in reversed(range(index.stat().st_size)):
        os.truncate(index, size)
        assert read_step(path).summaries == expected
    index.unlink()
    assert read_step(path).summaries == expected


def test_a_damaged_byte_costs_one_episode_that_is_named_or_the_rest_of_the_file(tmp_path: Path) -> None:
    path, expected = write(tmp_path), [episode(i) for i in range(3)]
    summaries = read_step(path).summaries
    for place in range(path.stat().st_size):
        flip(path, place)
        damages: list[str] = []
        try:
            found = list(episodes(path, damages))
        except RecordingError:
            assert place < START.size
            flip(path, place)
            continue
        assert damages
        assert all(any(same(each, one) for one in expected) for each in found)
        (hit,) = [s for s in summaries if s.offset <= place < s.offset + s.length] or [None]
        if hit:
            assert len(found) == 2
            with pytest.raises(RecordingError, match="checksum"):
                read_episode(path, hit)
        flip(path, place)


def test_another_format_and_no_recording_at_all_are_refused_in_one_line_that_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:8] + struct.pack("<I", 9) + path.read_bytes()[12:])
    with pytest.raises(RecordingError, match=r"step_00000012\.rec has format 9 of recordings, this Pronk reads 1"):
        read_step(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(RecordingError, match=r"step_00000012\.rec is no recording"):
        list(episodes(path))
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        read_step(tmp_path / "step_00000001.rec")


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_mask": Array("|u1", (9,), memoryview(b"\1" * 7))},
        {"loss_mask": Array("|u1", (2**20, 2**20), memoryview(b"\1" * 7))},
        {"token_ids": Array.of(np.zeros(6, dtype=np.int32))},
        {"columns": {"value": Array.of(np.zeros(4, dtype=np.float32))}},
        {"pieces": ("a",)},
        {"turns": (RecordedTurn(start=3, end=99, reward=0.0),)},
        {"turns": (RecordedTurn(start=3, end=5, reward=0.0, last_image=2),)},
        {"ending": "exploded"},
        {"images": ({"hash": "../../../../etc/passwd", "format": "png"},)},
        {"images": ({"hash": "0" * 32, "format": "../x"},)},
        {"columns": {"logprob": ("O", (1,), b"12345678")}},
        {"reward": float("nan")},
    ],
)
def test_an_episode_that_breaks_its_type_or_bounds_is_refused(changes) -> None:
    plain = partial(msgspec.to_builtins, builtin_types=(bytes, memoryview))
    sound = plain(episode())
    assert same(decode(msgspec.msgpack.encode(sound)), episode())
    with pytest.raises(RecordingError, match="a record is not what it should be"):
        decode(msgspec.msgpack.encode(sound | plain(changes)))


def test_a_record_that_claims_more_than_there_is_costs_no_memory(tmp_path: Path) -> None:
    path = write(tmp_path, count=0)
    for payload in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000):
        data = FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        path.write_bytes(path.read_bytes() + data)
    path.write_bytes(path.read_bytes() + FRAME.pack(2**32 - 1, 0))
    damages: list[str] = []
    assert list(episodes(path, damages)) == []
    assert len(damages) == 5 and "cut off" in damages[-1]
    many = msgspec.msgpack.encode([0] * (2**19 + 1))
    with pytest.raises(RecordingError, match="more than 524288 items"):
        decode(many)


def test_the_place_of_a_recording_is_its_address_and_its_file_name(tmp_path: Path) -> None:
    for text, name in (("12", "step_00000012.rec"), ("12-step_12", "evaluation_00000012_step_12.rec")):
        place = RecordingId.parse(text)
        assert (
            str(place) == text and place.path(tmp_path) == tmp_path / name and RecordingId.of(tmp_path / name) == place
        )
        (tmp_path / name).touch()
    for name in ("step_x.rec", "evaluation_00000001_.rec", "evaluation_1_A.rec", "step_00000001.idx", "other"):
        (tmp_path / name).touch()
    assert recordings(tmp_path) == [RecordingId(12), RecordingId(12, "step_12")] and recordings(tmp_path / "none") == []
    for text in ("", "x", "-1", "12-", "12-../a", "1" * 13, "12-a/b", "\u0661"):
        with pytest.raises(ValueError, match="is no step"):
            RecordingId.parse(text)


def test_a_step_recorded_anew_leaves_the_file_of_before_to_those_who_read_it(tmp_path: Path) -> None:
    path = write(tmp_path)
    with path.open("rb") as before:
        write(tmp_path, count=1)
        assert len(read_step(path).summaries) == 1
        assert len(before.read()) > path.stat().st_size


def test_images_are_held_against_their_names(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    file = tmp_path / "images" / IMAGE.file_name
    with pytest.raises(RecordingError, match="cannot be read"):
        read_image(tmp_path, IMAGE)
    file.write_bytes(b"an image")
    assert read_image(tmp_path, IMAGE) == b"an image"
    file.write_bytes(b"another")
    with pytest.raises(RecordingError, match="damaged"):
        read_image(tmp_path, IMAGE)


def test_a_failed_episode_without_columns_is_told_from_a_trained_one(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path, StepHeader(step=1, version=0, time=1.0), StepImages())
    empty = {name: Array.of(np.zeros(0, dtype)) for name, dtype in (("token_ids", "<i4"), ("loss_mask", "|u1"))}
    empty |= {n: Array.of(np.zeros(0, t)) for n, t in (("behaviour_logprobs", "<f4"), ("policy_versions", "<i4"))}
    nothing = {**empty, "turns": (), "pieces": (), "images": (), "columns": {}}
    writer.add(episode(ending=Ending.ENV_ERROR, error="ValueError: no", **nothing))
    writer.close()
    (summary,) = read_step(writer.path).summaries
    assert summary.failed and not summary.trained and summary.oldest == -1 and summary.error == "ValueError: no"
    shutil.copyfile(writer.path, tmp_path / "moved.rec")  # a file alone is enough
    assert read_step(tmp_path / "moved.rec").summaries == (summary,)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30, 3.0])
@pytest.mark.parametrize("name", ["policy_versions", "token_ids", "loss_mask"])
def test_a_recording_with_floats_for_integers_is_damaged_and_costs_nothing_else(
    tmp_path: Path, name: str, value: float
) -> None:
    path = write(tmp_path)
    good = episode(0)
    bad = msgspec.structs.replace(good, **{name: Array.of(np.full(7, value, np.float32))})
    payload = msgspec.msgpack.encode(bad)
    with path.open("ab") as file:
        file.write(FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload)
    read = read_step(path)
    assert len(read.summaries) == 3 and len(read.damages) == 1 and f"{name} is of floats" in read.damages[0]
