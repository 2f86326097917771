"""The hostile run's own parts: what it sends is hostile, and it notices a death, growth and a false exception."""

from __future__ import annotations

import asyncio
import io
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image as PILImage

from envs.colour import COLOURS
from envs.datasets import load_dataset
from launch.engines.network import free_port
from shared.engine.engine_api import EngineClient, EngineError
from shared.log import get_logger
from shared.types import Group
from shared.vision import IMAGE_FORMATS
from shared.wire.codec import WireError, check_trajectory, decode, encode
from tests.hostile import answers, images, messages, rows
from tests.hostile.attack import Attack
from tests.hostile.watch import LAST, MIB, Watch, resident_bytes
from tests.support.engines import false_engine
from tests.support.machine import until
from tests.support.wires import RULES, TICKET


def opens(data: bytes) -> bool:
    try:
        with PILImage.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            image.load()
    except Exception:  # noqa: BLE001 - whatever it is, it is no image
        return False
    return True


@pytest.mark.slow
def test_most_hostile_images_are_none_and_some_are_sound_but_odd() -> None:
    rng = random.Random(0)
    verdicts = Counter(opens(images.hostile(rng)) for _ in range(200))
    assert verdicts[False] > 80
    assert verdicts[True] > 10


def test_most_hostile_messages_are_refused_for_many_reasons() -> None:
    rng, reasons = random.Random(0), Counter[str]()
    small = (messages.nested_lists, messages.odd_request, lambda r: messages.odd_hello(RULES.vocab_size, r))
    for make in small:
        for _ in range(5):
            try:
                reasons[type(decode(make(rng))).__name__] += 1
            except WireError as error:
                reasons[error.reason] += 1
    assert {"Request", "Hello"} < set(reasons)
    assert len(reasons) > 2


def test_the_impostors_sound_episode_keeps_the_contract_so_that_only_what_it_bends_is_refused() -> None:
    sound = messages.played(3, RULES, [messages.Image.of(images.drawn("PNG"))])
    group = decode(messages.raw(encode(Group(TICKET.id, "x", (sound,)))))
    assert isinstance(group, Group)
    check_trajectory(group.trajectories[0], RULES)


def test_a_file_of_sound_rows_alone_is_the_colour_task(tmp_path: Path) -> None:
    rows.write(tmp_path / "rows.jsonl", 12, 0, 0)
    data = load_dataset(tmp_path / "rows.jsonl", system_prompt="Name it.")
    assert data.report.samples == 12
    assert {sample.label for sample in data.samples} <= set(COLOURS)
    content = data.samples[0].prompt[-1]["content"]
    assert [part["type"] for part in content] == ["image", "text"]


def test_hostile_rows_leave_the_sound_ones_readable(tmp_path: Path) -> None:
    rows.write(tmp_path / "rows.jsonl", 5, 30, 1)
    report = load_dataset(tmp_path / "rows.jsonl").report
    assert report.rows == 35
    assert 5 <= report.samples < 35


def test_an_exception_in_a_reader_is_kept_as_a_defect_and_a_closed_connection_is_not() -> None:
    def broken(rng: random.Random) -> None:
        raise KeyError("x")

    def closed(rng: random.Random) -> None:
        raise ConnectionResetError

    attack = Attack("rows", [broken, closed], 0.001, 0)
    attack.start()
    until(lambda: attack.sent > 20)
    attack.stop()
    assert list(attack.defects) == ["rows: KeyError: 'x'"]
    assert attack.refused["connection: ConnectionResetError"] + attack.defects.total() == attack.sent


@pytest.mark.slow
def test_a_proxy_passes_answers_on_until_it_bends_them() -> None:
    def info(handler, body) -> None:  # type: ignore[no-untyped-def]
        handler.reply(b'{"model_path": "m", "weight_version": "3"}')

    with false_engine({"/model_info": info}) as (url, _):
        proxy = answers.BendingProxy(free_port(), url, seed=0)
        outcomes = Counter[str]()

        async def ask() -> None:
            async with EngineClient(proxy.url) as client:
                assert (await client.model_info())["weight_version"] == "3"
                proxy.bending, proxy.share = True, 1.0
                for _ in range(30):
                    try:
                        outcomes[str(type(await client.model_info(1.0)).__name__)] += 1
                    except EngineError:
                        outcomes["EngineError"] += 1

        asyncio.run(ask())
        proxy.close()
    assert outcomes["EngineError"] > 10
    assert proxy.bent.total() >= 30  # some requests are sent again


def test_a_log_line_obeys_no_control_character_and_starts_no_other_line() -> None:
    logger = get_logger("a test of lines")
    record = logger.makeRecord("x", 20, "", 0, "actor %s is here", ("\x1b[2J\x9b\r\n12:00:00 learner INFO",), None)
    text = logger.handlers[0].format(record)
    assert text.endswith("actor \\x1b[2J\\x9b\\x0d\n    12:00:00 learner INFO is here")


def test_a_process_that_ends_is_noticed_and_so_is_growth() -> None:
    code = "input(); x = bytearray(64 << 20); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    watch, running = Watch(), {"learner": process.pid}
    assert process.stdin is not None
    watch.look(running, 9)
    assert watch.growth_mb() == {}
    until(lambda: resident_bytes(process.pid) > 6 * MIB)
    watch.look(running, 10)
    before = resident_bytes(process.pid)
    process.stdin.write(b"\n")
    process.stdin.flush()
    until(lambda: resident_bytes(process.pid) > before + 60 * MIB)
    watch.look(running, 11)
    assert watch.peak_mb()["learner"] > 50
    for _ in range(LAST):
        watch.look(running, 11)
    assert watch.growth_mb()["learner"] > 50
    assert watch.dead == []
    process.kill()
    process.wait()
    watch.look({}, 12)
    watch.look({"learner": process.pid}, 13)
    assert watch.dead == ["learner"]
