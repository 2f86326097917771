"""TRL's GRPOTrainer on the colour task, with its own generation; a process that tests.bench.trainers.colour starts.

    python -m tests.bench.trainers.trl_colour --peers PEERS --seed 0 --steps 40 --set learning_rate=5e-4 groups=16

A line of JSON a step, {"seconds", "success"}: when the rewards of the step's fresh answers are known, counted from the
start of training, and the share that is right. The last line has the held-out success, sampled, after the last step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
if "--peers" in sys.argv[:-1]:  # before transformers is imported, which looks for accelerate once
    sys.path.append(sys.argv[sys.argv.index("--peers") + 1])

import torch
from datasets import Dataset
from PIL.Image import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from trl import GRPOConfig, GRPOTrainer

from envs.colour import SYSTEM_PROMPT, build_env
from shared.types import Sample

MODEL = "launch/models/colour_tiny"
GROUPS, GROUP, NEW_TOKENS = 16, 4, 4  # a step, as the recipe colour_tiny.toml has them; `--set` may change the first
HELD_OUT, NUM_HELD_OUT = 2_000_000_000, 200
STDOUT = sys.stdout  # lines of JSON alone; what the trainer prints goes to stderr


class Processor(Qwen3VLProcessor):
    """Without the processor of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def processor() -> Processor:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    images = AutoImageProcessor.from_pretrained(MODEL)
    return Processor(images, tokenizer, None, chat_template=tokenizer.chat_template)


def question(seed: int) -> dict[str, Any]:
    observation, _ = build_env(Sample("", metadata={"seed": seed})).reset()
    image: Image = observation["multi_modal_data"]["image"][0]
    said = (("system", SYSTEM_PROMPT), ("user", observation["obs_str"]))
    return {"prompt": [{"role": role, "content": text} for role, text in said], "image": image, "seed": seed}


def right(seed: int, answer: str) -> float:
    env = build_env(Sample("", metadata={"seed": seed}))
    env.reset()
    return float(env.step(answer)[2]["reward"])


class Rewards:
    """The reward function; it prints the step's line."""

    __name__ = "right"

    def __init__(self) -> None:
        self.began = time.monotonic()

    def __call__(self, completions: list[list[dict[str, str]]], seed: list[int], **_: Any) -> list[float]:
        rewards = [right(s, answer[0]["content"]) for s, answer in zip(seed, completions, strict=True)]
        seconds = time.monotonic() - self.began
        print(json.dumps({"seconds": seconds, "success": sum(rewards) / len(rewards)}), file=STDOUT, flush=True)
        return rewards


@torch.no_grad()
def held_out_success(trainer: GRPOTrainer, banned: list[int]) -> float:
    asked = [question(HELD_OUT + k) for k in range(NUM_HELD_OUT)]
    processing, found = trainer.processing_class, 0.0
    for row in asked:
        image_and_text = [{"type": "image"}, {"type": "text", "text": row["prompt"][1]["content"]}]
        messages = [row["prompt"][0], {"role": "user", "content": image_and_text}]
        text = processing.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = processing(text=[text], images=[row["image"]], return_tensors="pt")
        how = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": 0, "suppress_tokens": banned}
        ids = trainer.model.generate(**inputs, **how)[0, inputs["input_ids"].shape[1] :]
        found += right(row["seed"], processing.decode(ids, skip_special_tokens=True))
    return found / len(asked)


def values_of(items: list[str]) -> dict[str, Any]:
    """Return the settings given as KEY=VALUE; values that are valid JSON are decoded."""
    values: dict[str, Any] = {}
    for item in items:
        key, _, value = item.partition("=")
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help="a folder with TRL and what it needs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE: settings of GRPOConfig, and groups of a step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen, processing = values_of(options.set), processor()
    groups = chosen.pop("groups", GROUPS)
    tokenizer = processing.tokenizer
    banned = [tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "vision_start", "vision_end")]
    settings: dict[str, Any] = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []}
    settings |= {"per_device_train_batch_size": groups * GROUP, "num_generations": GROUP, "max_steps": options.steps}
    settings |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "weight_decay": 0.0, "beta": 0.0}
    settings |= {"max_completion_length": NEW_TOKENS, "seed": options.seed, "save_strategy": "no", "disable_tqdm": True}
    settings |= {"generation_kwargs": {"suppress_tokens": banned}, "logging_steps": 10**6, "adam_beta2": 0.98} | chosen
    first = 1_000_000 * options.seed
    with contextlib.redirect_stdout(sys.stderr):
        trainer = GRPOTrainer(
            model=AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32),
            reward_funcs=(rewards := Rewards()),
            args=GRPOConfig(output_dir=tempfile.mkdtemp(), **settings),
            train_dataset=Dataset.from_list([question(first + k) for k in range(groups * options.steps)]),
            processing_class=processing,
        )
    rewards.began = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    seconds = time.monotonic() - rewards.began
    print(json.dumps({"seconds": seconds, "held_out": held_out_success(trainer, banned)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
