"""An environment and rewards that do what a sample's metadata say of `reset`, its step (`do`) and its `reward`."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

LEAK = []


class NoPlainData:
    """What msgpack has no type for."""


def misbehave(what, metadata):
    match what:
        case "computes":
            3 ** (10**9)  # in C, for minutes, with the interpreter's lock
        case "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
            time.sleep(1000)
        case "has a child":
            child = subprocess.Popen(["sleep", "1000"])
            Path(metadata["pids"]).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(1000)
        case "eats":
            LEAK.extend(np.ones(2**20) for _ in range(10**6))
        case "leaks":
            LEAK.append(np.ones(22 * 2**20))
        case "aborts":
            os.abort()
        case "segfaults":
            ctypes.string_at(0)
        case "exits":
            sys.exit(5)
        case "interrupts":
            raise KeyboardInterrupt
        case "raises":
            raise KeyError("board")


class Hostile:
    def __init__(self, metadata):
        self.metadata, self.heard = metadata, []
        if metadata.get("do") == "cannot be built":
            raise OSError("no board")

    def reset(self):
        misbehave(self.metadata.get("reset"), self.metadata)
        return self.look("begin"), {}

    def look(self, text):
        shade = len(self.heard) * 16 % 256
        return {"obs_str": text, "multi_modal_data": {"image": [Image.new("RGB", (64, 64), (shade, 0, 0))]}}

    def step(self, text):
        self.heard.append(text)
        misbehave(self.metadata.get("do"), self.metadata)
        info = {"reward": np.float32(len(text)), "pid": os.getpid(), "dice": np.random.random()}
        if self.metadata.get("do") == "tells too much":
            info["secret"] = NoPlainData()
        if self.metadata.get("do") == "nan reward":
            info["reward"] = float("nan")
        return self.look("go on"), text == "end", info

    def format_observation(self, observation):
        images = [{"type": "image", "image": image} for image in observation["multi_modal_data"]["image"]]
        return {"role": "user", "content": [*images, {"type": "text", "text": observation["obs_str"]}]}

    def close(self):
        if self.metadata.get("do") == "cannot be closed":
            raise OSError("stuck")


def build_env(sample=None, args=None, **_):
    return Hostile(sample.metadata)


def reward(played):
    """The number of answers that the environment itself has heard, where it can be seen."""
    misbehave(played.sample.metadata.get("reward"), played.sample.metadata)
    return len(played.answers) if played.env is None else 10 * len(played.env.heard)


async def later(played):
    return reward(played)
