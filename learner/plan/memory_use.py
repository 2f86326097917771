"""Bytes of a rank on its GPU and of a node's host memory, by kind, from a model's sizes only."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shared.config.optimizer_specs import optimizer_spec
from shared.families.model_sizes import DELTA_CHUNK, ModelSizes

FP32 = 4
DTYPE_BYTES = {"float32": FP32, "bfloat16": 2}  # bytes by model.dtype
ADAMW_STATES = 2  # states per parameter, float32 each
RESERVED_FRACTION = 0.06  # share of a GPU for context, communication buffers, and fragments of the allocator
PROCESS_BYTES = 3e9  # host bytes of a process, assumed: Python, torch, a CUDA context, decoded pictures


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings on which a run's sizes depend, besides the model; names are those of a recipe."""

    gpus: int = 1
    shard_size: int = 0  # ranks that share one copy; 0 = all
    dtype_bytes: int = 2  # dtype of forward and backward
    context: int = 1  # ranks that share each microbatch
    expert: int = 1  # ranks over which experts are dealt
    microbatch_tokens: int = 16384  # on each rank
    visual_share: float = 0.5  # share of tokens that belong to images
    sampled_share: float = 0.5  # share of tokens that are trained on
    logits_bytes: float = 14e9  # limit on the logits that the fused log-probability holds at a time
    activation_checkpointing: bool = False
    offload: bool = False
    reference: bool = False
    optimizer: str = "adamw"
    freeze: tuple[str, ...] = ()
    freeze_layers: int = 0
    lora_rank: int = 0  # 0 = all weights are trained
    lora_targets: tuple[str, ...] = ("attention", "dense")
    lora_publish: str = "merged"  # "merged" or "adapter": what engines are sent
    episodes: int = 128  # per step
    episode_tokens: int = 8192
    passes: int = 1  # over a step's episodes
    deals: int = 1  # times that a step's episodes are dealt to the ranks
    steps_held: int = 2  # steps whose episodes rank 0 can hold, including the one in training
    gpus_per_node: int = 8
    copies_checkpoint: bool = True  # keeps a copy of the state, to write the checkpoint in the background

    @property
    def ranks_of_node(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def shards(self) -> int:
        return self.shard_size or self.gpus

    @property
    def sharded(self) -> bool:
        """True if FSDP holds float32 shards and gathers copies of `dtype_bytes`."""
        return self.gpus > 1 or self.dtype_bytes != FP32 or self.offload

    @property
    def weight_bytes(self) -> int:
        """Bytes per parameter of a shard. With adapters, the frozen parameters are in the dtype of forward and
        backward."""
        return self.dtype_bytes if self.lora_rank else FP32


class _Bytes:
    """A record whose fields are bytes by kind."""

    __slots__ = ()

    @property
    def kinds(self) -> dict[str, float]:
        return asdict(self)  # type: ignore[call-overload]

    @property
    def total(self) -> float:
        return sum(self.kinds.values())

    def __str__(self) -> str:
        """Return GB by kind, without small kinds."""
        return ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in self.kinds.items() if size >= 5e7)


@dataclass(frozen=True, slots=True)
class GpuMemory(_Bytes):
    """Bytes of one rank on its GPU, at the peak."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    gathered: float  # whole blocks and the output head during their computation
    reduced: float  # float32 gradients of one of these before their sum over ranks
    activations: float  # tensors that one microbatch's forward keeps for its backward
    logits: float


@dataclass(frozen=True, slots=True)
class HostMemory(_Bytes):
    """Bytes of one node's host memory. A model's files are not counted: they are read as they are used, and the system
    can drop their pages."""

    processes: float
    offloaded: float
    checkpoint: float  # the copy that is written in the background
    pictures: float  # pixels: of all episodes on rank 0, on other ranks of the episodes that each trains on


@dataclass(frozen=True, slots=True)
class _Shards:
    """Bytes that one rank keeps between steps."""

    weights: float
    gradients: float
    optimizer: float
    reference: float

    @staticmethod
    def of(sizes: ModelSizes, setting: Setting) -> _Shards:
        if setting.lora_rank:
            return _Shards._adapted(sizes, setting)
        trained = sizes.parameters - _frozen(sizes, setting)
        moved = sizes.matrix_parameters * (1 - setting.freeze_layers / sizes.num_layers)
        spared = moved * (ADAMW_STATES - optimizer_spec(setting.optimizer).matrix_states)
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
        """Return the shards of a model with adapters; its reference is the model with adapters off."""
        padded = sizes.expert_parameters * (_padding(sizes, setting) - 1)
        adapters = FP32 * sizes.adapter_parameters(setting.lora_rank, setting.lora_targets) / setting.shards
        frozen = setting.weight_bytes * (sizes.parameters + padded) / setting.shards
        return _Shards(frozen + adapters, adapters, ADAMW_STATES * adapters, 0.0)

    def saved(self, setting: Setting) -> float:
        """Return the bytes that a checkpoint holds of these shards."""
        return (self.gradients if setting.lora_rank else self.weights) + self.optimizer


def _frozen(sizes: ModelSizes, setting: Setting) -> float:
    """Return the number of frozen parameters. Frozen decoder layers are counted with the mean size of a layer."""
    frozen = float(sizes.vision_parameters if "vision" in setting.freeze else 0)
    frozen += sizes.projector_parameters if "projector" in setting.freeze else 0
    if setting.freeze_layers:
        layers = sizes.text_parameters - sizes.head_parameters * (1 if sizes.tied else 2)
        frozen += sizes.head_parameters + layers * setting.freeze_layers / sizes.num_layers
    return frozen


def _padding(sizes: ModelSizes, setting: Setting) -> float:
    """Return the ratio of the fullest rank's part of the experts to an even part.

    A rank holds whole experts, unless experts are dealt; then each is sharded evenly.
    """
    if not sizes.num_experts or setting.expert > 1:
        return 1.0
    return -(-sizes.num_experts // setting.shards) * setting.shards / sizes.num_experts


def memory(sizes: ModelSizes, setting: Setting) -> GpuMemory:
    """Return the bytes of one rank on its GPU; with experts, of the fullest rank."""
    kept = _Shards.of(sizes, setting)
    here = 0.0 if setting.offload else 1.0
    rows = setting.microbatch_tokens * setting.sampled_share
    sparse = sizes.num_dense_layers < sizes.num_layers
    layer = sizes.layer_parameters(sparse=sparse) + sizes.layer_experts * (_padding(sizes, setting) - 1)
    # Of dealt experts only the rank's own are gathered.
    layer -= sizes.layer_experts * (1 - 1 / setting.expert) if sparse else 0
    # parameters that are in no block
    rest = sizes.head_parameters * (1 if sizes.tied else 2) + sizes.projector_parameters
    # Copies of two neighbouring blocks and of the rest; the gradients of one block and of the rest.
    gathered = setting.dtype_bytes * (3 * layer + 2 * rest)
    reduced = max(layer, rest)
    if setting.lora_rank:
        reduced = sizes.adapter_parameters(setting.lora_rank, setting.lora_targets) / sizes.num_layers
    return GpuMemory(
        weights=here * kept.weights,
        gradients=here * kept.gradients,
        optimizer=here * kept.optimizer,
        reference=here * kept.reference,
        gathered=gathered if setting.sharded else 0.0,
        reduced=FP32 * reduced if setting.sharded and setting.gpus > 1 else 0.0,
        activations=activations(sizes, setting),
        logits=min(setting.logits_bytes, FP32 * rows * sizes.vocab_size),
    )


def usable_bytes(gpu_bytes: float) -> float:
    """Return the bytes of a GPU that a rank may use."""
    return gpu_bytes * (1 - RESERVED_FRACTION)


def host_memory(sizes: ModelSizes, setting: Setting) -> HostMemory:
    """Return the bytes of the host memory of the node with rank 0."""
    kept, ranks = _Shards.of(sizes, setting), setting.ranks_of_node
    state = kept.weights + kept.gradients + kept.optimizer + kept.reference
    pixels = setting.episodes * setting.episode_tokens * setting.visual_share * sizes.merge * sizes.patch_values / 2
    # part of a step's episodes that each rank gets (learner/batch/delivery.py)
    share = min(1.0, setting.deals / setting.gpus)
    return HostMemory(
        processes=ranks * PROCESS_BYTES,
        offloaded=ranks * state if setting.offload else 0.0,
        checkpoint=ranks * kept.saved(setting) if setting.copies_checkpoint else 0.0,
        pictures=((ranks - 1) * share + setting.steps_held) * pixels,
    )


def activations(sizes: ModelSizes, setting: Setting) -> float:
    """Return the bytes that one microbatch's forward keeps for its backward."""
    kept: float
    text, patches = setting.microbatch_tokens, setting.microbatch_tokens * setting.visual_share * sizes.merge
    read = 2 * sizes.num_kv_heads * sizes.head_dim * setting.dtype_bytes  # keys and values of a token
    shared = read * setting.context if setting.context > 1 else 0
    per_token = _layer_bytes(sizes, setting.dtype_bytes) + shared
    recurrent = _delta_bytes(sizes, setting.dtype_bytes) if sizes.num_linear_layers else 0.0
    narrow = 3 if sizes.vision_gated_mlp else 2  # intermediate tensors of a gated MLP, or of an MLP with one activation
    per_patch = setting.dtype_bytes * (10 * sizes.vision_hidden + narrow * sizes.vision_intermediate)  # one block
    if setting.activation_checkpointing:  # inputs of all layers, and everything in one layer at a time
        kept = sizes.num_layers * sizes.hidden_size * setting.dtype_bytes * text
        kept += sizes.vision_depth * sizes.vision_hidden * setting.dtype_bytes * patches
        kept += max(max(per_token, recurrent) * text, per_patch * patches)
    else:
        trimmed = sizes.num_layers > sizes.num_deepstack  # see learner/model/forwards.py
        last = _layer_bytes(sizes, setting.dtype_bytes, output_share=setting.sampled_share if trimmed else 1.0) + shared
        whole = sizes.num_attention_layers - 1
        kept = (whole * per_token + last + sizes.num_linear_layers * recurrent) * text
        kept += sizes.vision_depth * per_patch * patches
    ends = _norm_bytes(sizes.hidden_size, setting.dtype_bytes) * text  # the last norm
    # inputs of the output head, and the embeddings
    ends += sizes.hidden_size * setting.dtype_bytes * (setting.sampled_share + 1) * text
    merged: float = setting.dtype_bytes * 4 * (1 + sizes.num_deepstack) * sizes.vision_hidden
    if sizes.merger_size:  # the norms around the blocks, then tensors of visual tokens
        merged += setting.dtype_bytes * 4 * (sizes.hidden_size + sizes.merger_size) / sizes.merge
    return kept + ends + (merged + FP32 * sizes.patch_values / 2) * patches


def _norm_bytes(size: int, dtype_bytes: int) -> float:
    """Return the bytes per token of one RMSNorm: its input and its result."""
    return size * 2 * dtype_bytes


def _layer_bytes(sizes: ModelSizes, dtype_bytes: int, output_share: float = 1.0) -> float:
    """Return the bytes per token of one decoder layer; the mean if only some layers have experts.

    `output_share`: share of the tokens whose output the layer computes. Queries are counted for all tokens, as on a
    GPU.
    """
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    gated = dtype_bytes * 3 * q if sizes.attention_gate else 0  # the gate, its sigmoid, and the product
    attention = gated + _norm_bytes(sizes.hidden_size, dtype_bytes) + (dtype_bytes * (q + kv) if sizes.qk_norm else 0)
    attention += dtype_bytes * 2 * (q + kv) + FP32 * sizes.num_heads
    norms = (sizes.layer_norms - 1) * _norm_bytes(sizes.hidden_size, dtype_bytes)
    return attention + output_share * (norms + _mlp_bytes(sizes, dtype_bytes))


def _delta_bytes(sizes: ModelSizes, dtype_bytes: int) -> float:
    """Return the bytes per token of one layer that is a gated delta net; its rule is computed in float32."""
    (keys, values), heads = sizes.linear_widths, sizes.linear_value_heads
    wide = heads * sizes.linear_key_dim  # keys, repeated for all heads
    conv = dtype_bytes * 5 * (2 * keys + values)  # its input, the inputs shifted, and what SiLU gets
    rule: float = FP32 * (4 * keys + 7 * wide + 5 * values + 5 * heads * DELTA_CHUNK)
    rule += FP32 * 2 * wide * sizes.linear_value_dim / DELTA_CHUNK  # states
    norm = FP32 * 3 * values + dtype_bytes * 3 * values
    both = 2 * _norm_bytes(sizes.hidden_size, dtype_bytes)
    return both + conv + rule + norm + _mlp_bytes(sizes, dtype_bytes)


def _mlp_bytes(sizes: ModelSizes, dtype_bytes: int) -> float:
    dense = dtype_bytes * (4 if sizes.fused_mlp else 3) * sizes.intermediate_size
    routed = sizes.experts_per_token * dtype_bytes * (2 * sizes.hidden_size + 4 * sizes.expert_size)
    sparse_share = 1 - sizes.num_dense_layers / sizes.num_layers
    return (1 - sparse_share) * dense + sparse_share * (routed + 3 * FP32 * sizes.num_experts)
