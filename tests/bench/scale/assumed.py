"""A loop for a published model: episodes, engines and publications from its sizes and what is assumed of the machines.

Seconds of a step and of sending weights are those of `learner.plan.duration`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from learner.plan.duration import Speed, publication_time, step_time
from learner.plan.memory_use import Setting
from shared.families.model_sizes import ModelSizes
from tests.bench.scale.draws import Constant, Drawn, LogNormal
from tests.bench.scale.sim_records import Design, EngineSpeed, Loop, Publication

GPU_BYTES = 141e9
MOST_BATCH = 256


@dataclass(frozen=True, slots=True)
class Serving:
    """What is assumed; none of it is measured here."""

    memory_gb: float = 3350.0  # a second, of one GPU at most: an H100
    memory_share: float = 0.7  # of it, reached by decoding
    prefill_mfu: float = 0.4
    kv_share: float = 0.85  # of a GPU's memory, weights and keys and values together
    load_gb: float = 50.0  # a second, of staged weights to a GPU
    turns: int = 3  # of an episode
    sigma: float = 1.0  # of an episode's sampled tokens, log-normal
    most: float = 8.0  # times their mean, where an episode is cut
    env_s: float = 0.5  # of a turn, log-normal with the same sigma


SERVING, SPEED = Serving(), Speed()


def engine_gpus(sizes: ModelSizes, setting: Setting, gpu_bytes: float = GPU_BYTES, serving: Serving = SERVING) -> int:
    """The fewest, a power of 2, whose memory has half of its room left for keys and values."""
    gpus = 1
    while 2 * setting.dtype_bytes * sizes.parameters > gpus * gpu_bytes * serving.kv_share:
        gpus *= 2
    return gpus


def engine_speed(
    sizes: ModelSizes, setting: Setting, speed: Speed, gpu_bytes: float = GPU_BYTES, serving: Serving = SERVING
) -> EngineSpeed:
    """Decoding reads all weights once a step, and of each running request keys and values of half an episode; reading
    a prompt is bound by arithmetic. An expert's weights are read whoever asks for it. ValueError: episodes too short to
    have a prompt, or too long for the room beside the weights."""
    gpus = engine_gpus(sizes, setting, gpu_bytes, serving)
    weights = float(setting.dtype_bytes * sizes.parameters)
    of_token = 2 * sizes.num_kv_heads * sizes.head_dim * setting.dtype_bytes * sizes.num_layers
    keys_values = of_token * setting.episode_tokens / 2
    bytes_s = gpus * serving.memory_gb * 1e9 * serving.memory_share
    prompt = round(setting.episode_tokens * (1 - setting.sampled_share))
    most = int((gpus * gpu_bytes * serving.kv_share - weights) / of_token)  # tokens that have room
    if not prompt:
        raise ValueError(f"--episode-tokens {setting.episode_tokens} leaves no token to a prompt; set it to 2 at least")
    if setting.episode_tokens > most:
        raise ValueError(
            f"--episode-tokens {setting.episode_tokens} has no room on {gpus} GPUs of {gpu_bytes / 1e9:.0f} GB, an "
            f"engine's, beside the weights; set it to {min(most, sizes.max_context)} at most"
        )
    flops = sizes.forward_flops([prompt], [], 1) / prompt
    return EngineSpeed(
        token_s=weights / bytes_s,
        request_s=keys_values / bytes_s,
        prefill_s=flops / (gpus * speed.tflops * 1e12 * serving.prefill_mfu),
        max_batch=min(MOST_BATCH, most // setting.episode_tokens),
    )


def publication_of(
    sizes: ModelSizes, setting: Setting, speed: Speed, design: Design, gpus: int, serving: Serving
) -> Publication:
    """`gpus` of an engine. A relay is handed the weights when they are gathered."""
    time = publication_time(sizes, setting, speed)
    load_s = time.sent / (gpus * serving.load_gb * 1e9)
    if design == "relay":
        gather_s = time.gathered / (speed.gather * 1e9)
        return Publication("relay", time.seconds - gather_s, load_s, gather_s)
    return Publication(design, time.seconds, load_s if design == "staged" else 0.0)


def loop_of(
    sizes: ModelSizes,
    setting: Setting,
    engines: int,
    *,
    group_size: int = 8,
    max_staleness: int = 1,
    design: Design = "staged",
    speed: Speed = SPEED,
    serving: Serving = SERVING,
    gpu_bytes: float = GPU_BYTES,
) -> Loop:
    """`setting.gpus` are the learner's. A setting whose shards do not divide them shares one copy. ValueError: there is
    no engine or no learner; or what `engine_speed` refuses."""
    if engines < 1 or setting.gpus < 1:
        raise ValueError(f"{setting.gpus} GPUs for the learner and {engines} engines make no loop; use more GPUs")
    setting = replace(setting, shard_size=0) if setting.gpus % setting.shards else setting
    tokens = setting.episode_tokens * setting.sampled_share
    gpus = engine_gpus(sizes, setting, gpu_bytes, serving)
    return Loop(
        episodes=Drawn(
            turns=Constant(serving.turns),
            prompt_tokens=Constant(setting.episode_tokens - tokens),
            tokens=LogNormal(tokens, serving.sigma, tokens * serving.most),
            env_s=LogNormal(serving.env_s, serving.sigma),
        ),
        engine=engine_speed(sizes, setting, speed, gpu_bytes, serving),
        publication=publication_of(sizes, setting, speed, design, gpus, serving),
        step_s=Constant(step_time(sizes, setting, speed).seconds),
        engines=engines,
        group_size=group_size,
        groups_per_step=max(1, setting.episodes // group_size),
        max_staleness=max_staleness,
    )
