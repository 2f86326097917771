"""Bytes of a rank on its GPU and of a node's host, by kind, from a model's sizes alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from learner.model.sizes import ModelSizes

FP32 = 4
DTYPE_BYTES = {"float32": FP32, "bfloat16": 2}  # by model.dtype
ADAMW_STATES, MUON_STATES = 2, 1  # float32 each
PROCESS_BYTES = 3e9  # of the host, assumed: Python, torch, a CUDA context, decoded pictures


@dataclass(frozen=True, slots=True)
class Setting:
    """What the sizes of a run depend on, besides the model; the names are those of a recipe."""

    gpus: int = 1
    shard_size: int = 0  # ranks that share one copy; 0 = all
    dtype_bytes: int = 2  # of forward and backward
    context: int = 1  # ranks that share each microbatch
    expert: int = 1  # ranks over which experts are dealt
    microbatch_tokens: int = 16384  # for each of its ranks
    visual_share: float = 0.5  # of the tokens, those of images
    sampled_share: float = 0.5  # of the tokens, those that are trained on
    logits_bytes: float = 14e9  # what the fused log-probability may hold of logits
    activation_checkpointing: bool = False
    offload: bool = False
    reference: bool = False
    optimizer: str = "adamw"
    freeze: tuple[str, ...] = ()
    freeze_layers: int = 0
    lora_rank: int = 0  # 0 = all weights are trained
    lora_targets: tuple[str, ...] = ("attention", "dense")
    lora_publish: str = "merged"  # or adapter: engines are sent these alone
    episodes: int = 128  # of a step
    episode_tokens: int = 8192
    passes: int = 1  # over a step's episodes
    deals: int = 1  # of these to the ranks, each anew
    steps_held: int = 2  # whose episodes rank 0 may have, those that are trained on included
    gpus_per_node: int = 8
    copies_checkpoint: bool = True  # to write it in the background

    @property
    def ranks_of_node(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def shards(self) -> int:
        return self.shard_size or self.gpus

    @property
    def sharded(self) -> bool:
        """Whether FSDP holds float32 shards and gathers copies of `dtype_bytes`."""
        return self.gpus > 1 or self.dtype_bytes != FP32 or self.offload

    @property
    def weight_bytes(self) -> int:
        """Of one parameter of a shard: adapters leave the others in the dtype of forward and backward."""
        return self.dtype_bytes if self.lora_rank else FP32


class _Bytes:
    """Fields by kind."""

    __slots__ = ()

    @property
    def kinds(self) -> dict[str, float]:
        return asdict(self)  # type: ignore[call-overload]

    @property
    def total(self) -> float:
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True)
class Memory(_Bytes):
    """Of one rank on its GPU, at the peak."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    gathered: float  # whole blocks and the output head while they are computed
    reduced: float  # gradients of one of these in float32, before their sum over the ranks
    activations: float  # what the forward of one microbatch keeps for its backward
    logits: float


@dataclass(frozen=True, slots=True)
class HostMemory(_Bytes):
    """Of one node. A model's files are read as they are used, and their pages can be given up."""

    processes: float
    offloaded: float
    checkpoint: float  # the copy that is written in the background
    pictures: float  # of all episodes on rank 0, and on the others of those that each trains on, as pixels


@dataclass(frozen=True, slots=True)
class _Shards:
    """What one rank keeps between steps."""

    weights: float
    gradients: float
    optimizer: float
    reference: float

    @staticmethod
    def of(sizes: ModelSizes, setting: Setting) -> _Shards:
        if setting.lora_rank:
            return _Shards._adapted(sizes, setting)
        trained = sizes.parameters - _frozen(sizes, setting)
        moved = sizes.matrix_parameters * (1 - setting.freeze_layers / sizes.num_layers)  # by Muon, if it is wanted
        spared = moved * (ADAMW_STATES - MUON_STATES) if setting.optimizer == "muon" else 0
        padded = sizes.expert_parameters * (_padding(sizes, setting) - 1)
        here = FP32 / setting.shards
        weights = here * (sizes.parameters + padded)
        return _Shards(
            weights=weights,
            gradients=here * (trained + padded),
            optimizer=here * (ADAMW_STATES * (trained + padded) - spared),
            reference=weights if setting.reference else 0.0,
        )

    @staticmethod
    def _adapted(sizes: ModelSizes, setting: Setting) -> _Shards:
        """The reference is the model with its adapters off."""
        padded = sizes.expert_parameters * (_padding(sizes, setting) - 1)
        adapters = FP32 * sizes.adapter_parameters(setting.lora_rank, setting.lora_targets) / setting.shards
        frozen = setting.weight_bytes * (sizes.parameters + padded) / setting.shards
        return _Shards(frozen + adapters, adapters, ADAMW_STATES * adapters, 0.0)

    def saved(self, setting: Setting) -> float:
        """What a checkpoint holds of it."""
        return (self.gradients if setting.lora_rank else self.weights) + self.optimizer


def _frozen(sizes: ModelSizes, setting: Setting) -> float:
    """Parameters that are not trained; of the first decoder layers, as many as of mean ones."""
    frozen = float(sizes.vision_parameters if "vision" in setting.freeze else 0)
    frozen += sizes.projector_parameters if "projector" in setting.freeze else 0
    if setting.freeze_layers:
        layers = sizes.text_parameters - sizes.head_parameters * (1 if sizes.tied else 2)
        frozen += sizes.head_parameters + layers * setting.freeze_layers / sizes.num_layers
    return frozen


def _padding(sizes: ModelSizes, setting: Setting) -> float:
    """How much more the fullest rank holds of the experts than its share: whole experts lie on a rank, unless they are
    dealt, and then cut evenly."""
    if not sizes.num_experts or setting.expert > 1:
        return 1.0
    return -(-sizes.num_experts // setting.shards) * setting.shards / sizes.num_experts


def memory(sizes: ModelSizes, setting: Setting) -> Memory:
    """Of one rank on its GPU; with experts, of the fullest."""
    kept = _Shards.of(sizes, setting)
    here = 0.0 if setting.offload else 1.0
    rows = setting.microbatch_tokens * setting.sampled_share
    sparse = sizes.num_dense_layers < sizes.num_layers
    layer = sizes.layer_parameters(sparse=sparse) + sizes.layer_experts * (_padding(sizes, setting) - 1)
    layer -= sizes.layer_experts * (1 - 1 / setting.expert) if sparse else 0  # of those that are dealt, its own alone
    rest = sizes.head_parameters * (1 if sizes.tied else 2) + sizes.projector_parameters  # all that is in no block
    # Copies of two neighbouring blocks and of the rest; the gradients of one block and of the rest.
    gathered = setting.dtype_bytes * (3 * layer + 2 * rest)
    reduced = max(layer, rest)
    if setting.lora_rank:
        reduced = sizes.adapter_parameters(setting.lora_rank, setting.lora_targets) / sizes.num_layers
    return Memory(
        weights=here * kept.weights,
        gradients=here * kept.gradients,
        optimizer=here * kept.optimizer,
        reference=here * kept.reference,
        gathered=gathered if setting.sharded else 0.0,
        reduced=FP32 * reduced if setting.sharded and setting.gpus > 1 else 0.0,
        activations=activations(sizes, setting),
        logits=min(setting.logits_bytes, FP32 * rows * sizes.vocab_size),
    )


def host_memory(sizes: ModelSizes, setting: Setting) -> HostMemory:
    """Of the node that has rank 0."""
    kept, ranks = _Shards.of(sizes, setting), setting.ranks_of_node
    state = kept.weights + kept.gradients + kept.optimizer + kept.reference
    pixels = setting.episodes * setting.episode_tokens * setting.visual_share * sizes.merge * sizes.patch_values / 2
    share = min(1.0, setting.deals / setting.gpus)  # of a step's, which a rank gets (learner/parallel/delivery.py)
    return HostMemory(
        processes=ranks * PROCESS_BYTES,
        offloaded=ranks * state if setting.offload else 0.0,
        checkpoint=ranks * kept.saved(setting) if setting.copies_checkpoint else 0.0,
        pictures=((ranks - 1) * share + setting.steps_held) * pixels,
    )


def activations(sizes: ModelSizes, setting: Setting) -> float:
    """Bytes that one microbatch's forward keeps for its backward."""
    kept: float
    text, patches = setting.microbatch_tokens, setting.microbatch_tokens * setting.visual_share * sizes.merge
    read = 2 * sizes.num_kv_heads * sizes.head_dim * setting.dtype_bytes  # keys and values of a token
    shared = read * setting.context if setting.context > 1 else 0
    per_token = _layer_bytes(sizes, setting.dtype_bytes) + shared
    narrow = 3 if sizes.qwen25 else 2  # of a gated MLP, or of one with one activation
    per_patch = setting.dtype_bytes * (10 * sizes.vision_hidden + narrow * sizes.vision_intermediate)  # of one block
    if setting.activation_checkpointing:  # the inputs of all, and one at a time in full
        kept = sizes.num_layers * sizes.hidden_size * setting.dtype_bytes * text
        kept += sizes.vision_depth * sizes.vision_hidden * setting.dtype_bytes * patches
        kept += max(per_token * text, per_patch * patches)
    else:
        trimmed = sizes.num_layers > sizes.num_deepstack  # see learner/model/forwards.py
        last = _layer_bytes(sizes, setting.dtype_bytes, asked=setting.sampled_share if trimmed else 1.0) + shared
        kept = ((sizes.num_layers - 1) * per_token + last) * text + sizes.vision_depth * per_patch * patches
    ends = _norm_bytes(sizes.hidden_size, setting.dtype_bytes) * text  # the last norm
    ends += sizes.hidden_size * setting.dtype_bytes * (setting.sampled_share + 1) * text  # its rows; the embeddings
    merged = setting.dtype_bytes * 4 * (1 + sizes.num_deepstack) * sizes.vision_hidden
    return kept + ends + (merged + FP32 * sizes.patch_values / 2) * patches


def _norm_bytes(size: int, dtype_bytes: int) -> float:
    """Of one RMSNorm a token: its input and its result."""
    return size * 2 * dtype_bytes


def _layer_bytes(sizes: ModelSizes, dtype_bytes: int, asked: float = 1.0) -> float:
    """Of one decoder layer a token (the mean over its layers, where some have experts); `asked`: share of the tokens
    whose output it computes. Queries are counted for all, as GPUs compute them."""
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    attention = _norm_bytes(sizes.hidden_size, dtype_bytes) + (0 if sizes.qwen25 else dtype_bytes * (q + kv))
    attention += dtype_bytes * 2 * (q + kv) + FP32 * sizes.num_heads
    dense = dtype_bytes * 3 * sizes.intermediate_size
    routed = sizes.experts_per_token * dtype_bytes * (2 * sizes.hidden_size + 4 * sizes.expert_size)
    sparse_share = 1 - sizes.num_dense_layers / sizes.num_layers
    mlp = (1 - sparse_share) * dense + sparse_share * (routed + 3 * FP32 * sizes.num_experts)
    return attention + asked * (_norm_bytes(sizes.hidden_size, dtype_bytes) + mlp)
