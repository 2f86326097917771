"""What rank 0 pays to take in episodes with many images: 512 simulated actors, PNGs of 512x512, real sockets.

    python tests/bench/intake.py [--episodes 4096] [--steps 10] [--actors 512] [--processes 2]

Each step takes `--episodes` episodes of 8 turns and 20 images, in groups of 8, through the ticket server with all
checks that a run makes, and makes the episodes that the learner plans with. The actors are other processes; every
image of an episode is another file. The PNGs hold a photograph-like patch, lines and text: about 85 KB each. The last
line is one JSON object. `cpu_ms_per_image` and `cpu_ms_per_episode` divide all CPU time of rank 0's process, ZeroMQ's
threads included, by the images and by the episodes; `peak_bytes` is the most that it held, `bound_bytes` what it may
hold: the files and arrays of the groups that the tickets allow, and `--slack-mib`. `rss_bytes` is the resident memory
while the groups of each step are here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import struct
import sys
import tempfile
import time
import zlib
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from PIL import Image as PILImage
from PIL import ImageDraw

from learner.batch.episodes import check_group, make_episodes
from learner.batch.image_decoder import ImageDecoder
from learner.tickets.sources import SeedSource
from learner.tickets.ticket_book import BookSettings
from learner.tickets.ticket_server import TicketServer, TicketServerSettings
from shared.config.objective_section import ObjectiveConfig
from shared.families.registry import FAMILIES
from shared.rgb_images import as_png
from shared.types import Ending, Group, Image, Trajectory, Turn
from shared.util.process_memory import keep_heap, use_one_heap
from shared.vision import VisionSpec
from shared.wire.codec import TokenRules, encode
from tests.bench.load import VOCAB, Actors
from tests.fuzz.mutations import resident_bytes

PLACEHOLDER = VOCAB - 1
SIDE, FILES = 512, 32  # of the images; different pictures, each made anew by a number in its file
IMAGES, TURNS, TURN_TOKENS = 20, 8, 128  # of an episode
GROUP = 8
IHDR_END = 33  # of a PNG


def picture(rng: np.random.Generator) -> bytes:
    """A PNG as an environment's screen is: plain areas, lines, text, and a part that hardly compresses."""
    image = PILImage.new("RGB", (SIDE, SIDE), tuple(rng.integers(200, 255, 3).tolist()))
    draw = ImageDraw.Draw(image)
    for number in range(40):
        x, y = rng.integers(0, SIDE - 60, 2).tolist()
        draw.text((x, y), f"some text {number}", fill=(0, 0, 0))
        draw.rectangle((x, y, x + 50, y + 40), outline=tuple(rng.integers(0, 255, 3).tolist()))
    noise = rng.normal(0, 1, (200, 200, 3)).cumsum(0).cumsum(1)
    photo = ((noise - noise.min()) / np.ptp(noise) * 255).astype(np.uint8)
    image.paste(PILImage.fromarray(photo), (100, 100))
    return as_png(image)


def numbered(png: bytes, number: int) -> bytes:
    """The same picture as another file."""
    text = b"tEXtn\0" + str(number).encode()
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    return png[:IHDR_END] + chunk + png[IHDR_END:]


class ImageActors(Actors):
    """Each ticket is answered by a group whose images nobody has sent before."""

    def __init__(self, address: str, first: int, count: int, slots: int) -> None:
        super().__init__(address, first, count, slots)
        rng = np.random.default_rng(first)
        self.files = [picture(rng) for _ in range(FILES)]
        self.numbers = itertools.count(first << 40)
        self.played: dict[int, Trajectory] = {}  # by version

    def group(self, ticket_id: str, version: int) -> list:
        if version not in self.played:
            self.played = {version: episode(version)}
        return encode(Group(ticket_id, "load", tuple(self._shown(self.played[version]) for _ in range(GROUP)), 0.1))

    def _shown(self, played: Trajectory) -> Trajectory:
        numbers = itertools.islice(self.numbers, IMAGES)
        images = tuple(Image.of(numbered(self.files[n % FILES], n)) for n in numbers)
        return Trajectory(**{f: getattr(played, f) for f in Trajectory.__struct_fields__} | {"images": images})


def episode(version: int) -> Trajectory:
    """8 turns; the 20 images come before them, as evenly as they can. Half of each turn's tokens are sampled."""
    rng, half = np.random.default_rng(version), TURN_TOKENS // 2
    mask = np.tile(np.repeat(np.array([0, 1], np.uint8), half), TURNS)
    ids = rng.integers(2, VOCAB - 1, len(mask), dtype=np.int32)
    for number in range(IMAGES):
        turn, place = number * TURNS // IMAGES, number
        ids[turn * TURN_TOKENS + place] = PLACEHOLDER
    return Trajectory(
        token_ids=ids,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -rng.random(len(mask)), 0.0).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        turns=tuple(Turn(n * TURN_TOKENS + half, (n + 1) * TURN_TOKENS, 0.5) for n in range(TURNS)),
        reward=1.0,
        images=(),
        ending=Ending.COMPLETED,
        metrics={"success": 1.0},
        text="an answer " * 20,
    )


def play(address: str, first: int, count: int, slots: int) -> None:
    ImageActors(address, first, count, slots).run()


def learn(server: TicketServer, decoder: ImageDecoder, steps: int, groups: int) -> dict[str, object]:
    """One more step comes first, of which nothing is counted."""
    rss, cpu_s, step_s = [], 0.0, []
    for step in range(steps + 1):
        began, started = time.process_time(), time.monotonic()
        batch = [group for _, group in server.next_batch(groups, 600.0)]
        made = make_episodes(batch, decoder, ObjectiveConfig())
        assert len(made) == groups * GROUP
        server.commit()
        server.metrics()
        rss.append(resident_bytes())
        del batch, made
        server.set_version(step + 1)
        if step:
            cpu_s += time.process_time() - began
            step_s.append(time.monotonic() - started)
    episodes = steps * groups * GROUP
    return {
        "cpu_ms_per_image": round(1e3 * cpu_s / episodes / IMAGES, 4),
        "cpu_ms_per_episode": round(1e3 * cpu_s / episodes, 3),
        "step_s": round(sum(step_s) / steps, 2),
        "rss_bytes": rss[1:],
    }


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def served(options: argparse.Namespace, folder: str) -> tuple[TicketServer, ImageDecoder]:
    spec = VisionSpec(image_token_id=PLACEHOLDER, family=FAMILIES["qwen3_vl"])
    decoder, groups = ImageDecoder(spec), options.episodes // GROUP
    settings = {"groups_per_version": groups, "max_staleness": options.max_staleness}
    book = BookSettings(group_size=GROUP, lost_after_s=600.0, **settings)  # an actor's process is busy for long
    check = partial(check_group, decoder=decoder, max_context=2**16)
    rules = TokenRules(PLACEHOLDER, (), VOCAB)
    served = TicketServerSettings("tcp://127.0.0.1:*", Path(folder), "intake", rules, 60.0, check=check)
    return TicketServer(SeedSource(), book, served), decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=4096, help="of a step; a multiple of 8")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--actors", type=int, default=512)
    parser.add_argument("--processes", type=int, default=2, help="that the actors share")
    parser.add_argument("--slots", type=int, default=2, help="groups that an actor plays at once")
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--slack-mib", type=int, default=512, help="beside the groups")
    options = parser.parse_args()
    use_one_heap()  # as the learner does
    keep_heap()
    groups = options.episodes // GROUP
    file_bytes = len(picture(np.random.default_rng(0)))
    with tempfile.TemporaryDirectory() as folder:
        server, decoder = served(options, folder)
        before, share = peak_bytes(), options.actors // options.processes
        spawn = multiprocessing.get_context("spawn")
        workers = [
            spawn.Process(target=play, args=(server.address, i * share, share, options.slots), daemon=True)
            for i in range(options.processes)
        ]
        for worker in workers:
            worker.start()
        while server.metrics()["actors/known"] < share * options.processes:
            time.sleep(0.1)
        server.open()
        result = learn(server, decoder, options.steps, groups)
        counts = server.metrics()
        server.stop("enough")
        for worker in workers:
            worker.join(10.0)
    held = (options.max_staleness + 1) * options.episodes * (IMAGES * file_bytes + 16 * TURNS * TURN_TOKENS)
    row = {"episodes": options.episodes, "steps": options.steps, "actors": share * options.processes}
    row |= {"file_bytes": file_bytes, **result, "peak_bytes": peak_bytes()}
    row |= {
        "bound_bytes": before + held + options.slack_mib * 2**20,
        "rejected": counts["wire/rejected"],
        "reissued": counts["tickets/reissued"],
    }
    print(json.dumps(row | {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
