"""The sizes of a model: parameters, adapters and floating-point operations by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DELTA_CHUNK = 64  # tokens that the gated delta rule computes at once (kernels/delta_rule.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model made of a decoder and a vision tower, and which optional parts these have.

    Names are those of config.json. `num_experts` 0: a dense model. `vision_depth` 0: a text model, without a tower.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_dense_layers: int  # number of the layers without experts
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0  # of the expert that every token uses, with a gate
    tied: bool  # the output head is the embeddings
    max_context: int
    layer_norms: int = 2  # norms of the hidden size in a decoder layer
    fused_mlp: bool = False  # one matrix gives a dense MLP's gate and what it multiplies
    qk_norm: bool = True  # each head of queries and keys is normed
    attention_bias: bool = False  # queries, keys and values have biases
    attention_gate: bool = False  # the projection of queries also gives a gate for each head's output
    num_linear_layers: int = 0  # number of the layers that are gated delta nets; the others attend
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    conv_taps: int = 0
    vision_depth: int = 0
    vision_hidden: int = 0
    vision_intermediate: int = 0
    vision_full_blocks: int = 0  # blocks that attend to the whole image; the others attend within windows
    window_patches: int = 0  # patches of one window
    vision_positions: int = 0  # number of learned positions; 0 = none
    vision_gated_mlp: bool = False  # SwiGLU, else one activation
    vision_rms_norm: bool = False  # RMSNorms, else LayerNorms
    vision_bias: bool = True  # the blocks' projections and MLPs have biases
    vision_patch_bias: bool = True  # the patches' embedding has a bias
    patch_values: int = 0  # colours x frames x height x width of a patch
    merge: int = 1  # patches of one visual token
    merger_size: int = 0  # width of the gated MLP of a merger that joins patches by a convolution; 0 = Qwen's merger
    num_deepstack: int = 0  # levels of the tower whose features are added in a layer of the decoder

    # ------------------------------------------------------------------ parameters

    @property
    def attention_matrices(self) -> int:
        """The parameters of the projections of one decoder layer that attends."""
        heads = (2 + self.attention_gate) * self.num_heads + 2 * self.num_kv_heads
        return self.hidden_size * heads * self.head_dim

    @property
    def attention_vectors(self) -> int:
        """The parameters of the norms and biases of one decoder layer that attends."""
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.attention_bias else 0
        return self.layer_norms * self.hidden_size + biases + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def attention_parameters(self) -> int:
        return self.attention_matrices + self.attention_vectors

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - self.num_linear_layers

    @property
    def linear_widths(self) -> tuple[int, int]:
        """The widths of a delta net's keys and of its values."""
        return self.linear_key_heads * self.linear_key_dim, self.linear_value_heads * self.linear_value_dim

    @property
    def linear_matrices(self) -> int:
        """The parameters of one delta net's projections."""
        keys, values = self.linear_widths
        return self.hidden_size * (2 * keys + 3 * values + 2 * self.linear_value_heads)

    @property
    def linear_parameters(self) -> int:
        """The parameters of one delta net, with the two norms of its layer."""
        keys, values = self.linear_widths
        vectors = 2 * self.linear_value_heads + self.linear_value_dim + 2 * self.hidden_size
        return self.linear_matrices + (2 * keys + values) * self.conv_taps + vectors

    @property
    def mixer_parameters(self) -> int:
        """The parameters of all decoder layers but their MLPs."""
        linear = self.num_linear_layers * self.linear_parameters if self.num_linear_layers else 0
        return self.num_attention_layers * self.attention_parameters + linear

    def mlp_parameters(self, *, sparse: bool, active: bool = False) -> int:
        """Return the parameters of the MLP, or of router and experts, of one decoder layer; with `active`, only those
        that one token uses."""
        if not sparse:
            return 3 * self.hidden_size * self.intermediate_size
        experts = self.experts_per_token if active else self.num_experts
        router = self.num_experts * self.hidden_size
        return router + self.shared_expert + experts * 3 * self.hidden_size * self.expert_size

    @property
    def shared_expert(self) -> int:
        """The parameters of one layer's shared expert and its gate."""
        return self.hidden_size * (3 * self.shared_expert_size + 1) if self.shared_expert_size else 0

    def layer_parameters(self, *, sparse: bool, active: bool = False) -> int:
        """Return the parameters of the largest decoder layer; with `active`, only those that one token uses."""
        mixer = max(self.attention_parameters, self.linear_parameters if self.num_linear_layers else 0)
        return mixer + self.mlp_parameters(sparse=sparse, active=active)

    @property
    def layer_experts(self) -> int:
        """The parameters of the experts of one layer that has some."""
        return self.num_experts * 3 * self.hidden_size * self.expert_size

    @property
    def expert_rows(self) -> tuple[int, int]:
        """Rows of one expert's matrices, as transformers holds them."""
        return 2 * self.expert_size, self.hidden_size

    @property
    def expert_parameters(self) -> int:
        return (self.num_layers - self.num_dense_layers) * self.layer_experts

    @property
    def matrix_parameters(self) -> int:
        """The parameters of all decoder layers' matrices except the stacks of experts: those that Muon trains."""
        sparse = self.num_layers - self.num_dense_layers
        dense = self.num_dense_layers * 3 * self.hidden_size * self.intermediate_size
        mixers = self.num_attention_layers * self.attention_matrices + self.num_linear_layers * self.linear_matrices
        return mixers + dense + sparse * (self.num_experts * self.hidden_size + self.shared_expert)

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def text_parameters(self) -> int:
        sparse = self.num_layers - self.num_dense_layers
        layers = sparse * self.mlp_parameters(sparse=True) if sparse else 0
        layers += self.num_dense_layers * self.mlp_parameters(sparse=False)
        return self.mixer_parameters + layers + self.hidden_size + self.head_parameters * (1 if self.tied else 2)

    @property
    def vision_block_parameters(self) -> int:
        h, i = self.vision_hidden, self.vision_intermediate
        rising = 2 if self.vision_gated_mlp else 1  # matrices from the hidden to the intermediate size
        biases = rising * i + h + 4 * h if self.vision_bias else 0
        return 2 * self._vision_norm * h + 4 * h * h + (rising + 1) * h * i + biases

    @property
    def _vision_norm(self) -> int:
        """Vectors of one norm of the tower: a weight, and a bias in LayerNorms."""
        return 1 if self.vision_rms_norm else 2

    @property
    def vision_parameters(self) -> int:
        ends = self.patch_values + self.vision_patch_bias + self.vision_positions
        ends += 2 * self._vision_norm if self.merger_size else 0  # norms before and after the blocks
        return self.vision_depth * self.vision_block_parameters + self.vision_hidden * ends

    @property
    def projector_parameters(self) -> int:
        """The parameters of the mergers, which make visual tokens of patches, including the deepstack's."""
        if not self.vision_depth:
            return 0
        wide, out = self.merge * self.vision_hidden, self.hidden_size
        if self.merger_size:
            return (wide + 1) * out + out * out + 2 * out + 3 * out * self.merger_size
        linear = wide * wide + wide + wide * self.hidden_size + self.hidden_size
        norms = self._vision_norm * (self.vision_hidden + self.num_deepstack * wide)
        return (1 + self.num_deepstack) * linear + norms

    @property
    def parameters(self) -> int:
        return self.text_parameters + self.vision_parameters + self.projector_parameters

    def state_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of the states that an engine holds for one sequence, besides keys and values: those of the
        delta nets' rules, in float32, and of their convolutions."""
        keys, values = self.linear_widths
        rule = 4 * self.linear_value_heads * self.linear_key_dim * self.linear_value_dim
        return self.num_linear_layers * (rule + dtype_bytes * (2 * keys + values) * max(self.conv_taps - 1, 0))

    # ------------------------------------------------------------------ adapters

    def adapted(self, targets: Sequence[str]) -> list[tuple[int, int, int]]:
        """Return (count, rows, columns) of the matrices that these targets of learner.lora adapt."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sparse = (self.num_layers - self.num_dense_layers) * self.num_experts
        shared = self.num_layers - self.num_dense_layers if self.shared_expert_size else 0
        wide, v, i = self.merge * self.vision_hidden, self.vision_hidden, self.vision_intermediate
        mergers = 1 + self.num_deepstack if self.vision_depth else 0
        blocks, dense = self.vision_depth, self.num_dense_layers
        full, (keys, values) = self.num_attention_layers, self.linear_widths
        rising = 2 if self.vision_gated_mlp else 1
        i_dense = self.intermediate_size
        gates = (dense, 2 * i_dense, h) if self.fused_mlp else (2 * dense, i_dense, h)
        matrices = {
            "attention": [
                (full, (1 + self.attention_gate) * q, h),
                (2 * full, kv, h),
                (full, h, q),
                (self.num_linear_layers, 2 * keys + values, h),
                (self.num_linear_layers, values, h),
                (self.num_linear_layers, h, values),
            ],
            "dense": [
                gates,
                (dense, h, i_dense),
                *[(2 * shared, self.shared_expert_size, h), (shared, h, self.shared_expert_size)],
            ],
            "experts": [(sparse, 2 * self.expert_size, h), (sparse, h, self.expert_size)],
            "vision": [
                (blocks, 3 * v, v),
                (blocks, v, v),
                (blocks * rising, i, v),
                (blocks, v, i),
            ],
        }
        if self.merger_size:
            matrices["vision"] += [(1, h, h), (2, self.merger_size, h), (1, h, self.merger_size)]
        else:
            matrices["vision"] += [(mergers, wide, wide), (mergers, h, wide)]
        return [each for target in targets for each in matrices[target] if each[0]]

    def adapter_parameters(self, rank: int, targets: Sequence[str]) -> int:
        return sum(count * rank * (rows + columns) for count, rows, columns in self.adapted(targets))

    # ------------------------------------------------------------------ floating-point operations

    def forward_flops(self, documents: Sequence[int], images: Sequence[int], num_rows: int) -> float:
        """Return the operations of one forward over packed documents: matrix products and attention, nothing else.

        `documents`: number of tokens of each, with causal attention. `images`: number of patches of each distinct
        image, whose two equal frames cost one product. `num_rows`: number of rows for which logits are computed; in the
        last layer the projections of queries and outputs and the MLP are counted for these rows only, attention for all
        (a GPU computes the queries of all rows, too). A training step takes three times as many operations, if nothing
        is recomputed.
        """
        return self.part_flops(sum(documents), sum(n * (n + 1) // 2 for n in documents), images, num_rows)

    @property
    def _rule_flops(self) -> int:
        """The operations of one delta net's rule for one token: products within its chunk and with the state."""
        k, v = self.linear_key_dim, self.linear_value_dim
        within = DELTA_CHUNK * (2 * k + (k + v) + v)  # two of keys, the triangular system, the values
        return self.linear_value_heads * 2 * (within + 3 * k * v)

    def part_flops(self, tokens: int, pairs: int, images: Sequence[int], num_rows: int) -> float:
        """Return the operations, as `forward_flops` counts them, for a part of the documents' tokens. `pairs`: number
        of pairs of one of these tokens as query and a key that it reads."""
        patches, h = sum(images), self.vision_hidden
        sparse = self.num_layers - self.num_dense_layers
        active = self.mixer_parameters + self.num_dense_layers * self.mlp_parameters(sparse=False)
        active += sparse * self.mlp_parameters(sparse=True, active=True) if sparse else 0
        width = self.num_heads * self.head_dim
        text = 2 * active * tokens + 2 * self.num_attention_layers * width * 2 * pairs
        text += self.num_linear_layers * self._rule_flops * tokens
        text += 2 * self.head_parameters * num_rows
        if self.num_layers > self.num_deepstack:  # see learner/model/forwards.py
            key_value = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
            last = self.attention_parameters + self.mlp_parameters(sparse=sparse > 0, active=True) - key_value
            text -= 2 * last * (tokens - num_rows)
        vision = 2 * (self.vision_depth * self.vision_block_parameters + h * self.patch_values // 2) * patches
        full = self.vision_full_blocks
        vision += 4 * full * h * sum(n * n for n in images)
        vision += 4 * (self.vision_depth - full) * h * sum(n * min(n, self.window_patches) for n in images)
        return text + vision + 2 * self.projector_parameters * patches / self.merge
