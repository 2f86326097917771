"""The policy: a language model, with or without a vision tower, with a value head, computed on packed documents.

Shape suffixes: T = packed tokens, N = sampled tokens, n = those that this rank predicts, H = hidden size, V =
vocabulary, P = patches, M = visual tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from learner.batch.microbatch import Microbatch
from learner.batch.vision_inputs import with_tower
from learner.model.adapt import adapt, materialize
from learner.model.context_collectives import exchanged
from learner.model.critic import DeepCritic, LinearCritic, Listener, chosen_layers
from learner.model.head import OutputHead
from learner.model.lora_adapters import Adapters, is_factor
from learner.model.weight_files import WeightFiles, local_part
from learner.objective.loss_records import Labels
from learner.vtrace import turn_indices
from shared.families.registry import family_in, family_named
from shared.vision import VisionSpec


class PolicyOutput(NamedTuple):
    """A policy's outputs for the sampled tokens at the sampling temperature: float32 [N] and differentiable, unless
    stated otherwise."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    lower: LowerActivations | None = None  # set if `return_lower` is given
    labels: Labels | None = None  # set if `label_threshold` is given
    label_logprobs: Tensor | None = None  # float32 [K], differentiable; set if `labels` is given


Vision = tuple[Tensor, list[Tensor]] | None
"""Features of visual tokens [M,H], and each deepstack layer's; None of a text model."""


@dataclass(frozen=True, slots=True, eq=False)
class LowerActivations:
    """The outputs of a policy's tower and first decoder layers for a microbatch, for another policy with the same
    layers."""

    vision: Vision
    rotary: tuple[Tensor, Tensor]  # cosines and sines of the rotary embedding
    num_layers: int
    hidden_1TH: Tensor  # input of the next layer
    critic_states: list[Tensor]  # the states of these layers that a critic reads


class Policy(nn.Module):
    """A language model with a value head. Its logits are never kept. `vlm` may be a text model, without a tower."""

    def __init__(self, vlm: PreTrainedModel, spec: VisionSpec, critic_width: int = 0) -> None:
        """Adapt `vlm` in place. `critic_width`: width of a critic that reads several layers; 0 = a linear critic on the
        final hidden state."""
        super().__init__()
        self.vlm = vlm
        self.family = family_named(vlm.config.model_type, "the policy")
        self.spec = spec = with_tower(spec, getattr(vlm.config, "vision_config", None))
        self.dtype = torch.float32  # dtype of forward and backward, and of the published weights
        self.adapters: Adapters | None = None  # set if adapters are trained instead of the weights of `vlm`
        self.trimmed = adapt(vlm, spec)  # true if the last layer accepts `rows=`
        hidden_size, layers = vlm.config.get_text_config().hidden_size, self.decoder.layers
        chosen = chosen_layers(len(layers))
        self.listener = Listener([layers[i] for i in chosen])
        if critic_width:
            self.value_head: nn.Module = DeepCritic(hidden_size, len(chosen) + 1, critic_width)
        else:
            self.value_head = LinearCritic(hidden_size)
        self.banned_ids = spec.banned_ids

    def forward(
        self,
        batch: Microbatch,
        temperature: float,
        lower: LowerActivations | None = None,
        *,
        return_lower: int | None = None,
        label_threshold: float | None = None,
        labels: Labels | None = None,
    ) -> PolicyOutput:
        """Return logprobs, entropies and values of the microbatch's sampled tokens.

        `lower`: activations of a policy with the same tower and first layers, which are then not computed again.
        `return_lower`: number of layers whose activations are returned in the output's `lower`; use it only without
        gradient. `label_threshold`: tokens of at least this probability are this policy's labels, returned in the
        output's `labels`. `labels`: labels of another policy; their logprobs are returned in `label_logprobs`.
        """
        activations = self._lower_activations(batch, lower, return_lower or 0)
        hidden_nH, critic_states = self._final_hidden(batch, activations)
        head = OutputHead(self.vlm.lm_head.weight, temperature, self.banned_ids, batch.shard)
        logprobs, entropies = head.logprobs(hidden_nH, batch.asked_ids)
        own_labels = None if label_threshold is None else head.find_labels(hidden_nH, logprobs, label_threshold)
        label_logprobs = None if labels is None else head.label_logprobs(hidden_nH, labels)
        if self.has_deep_critic:
            turns_N = turn_indices(batch.turn_end, batch.episode_end)
            values = self.value_head([*critic_states, hidden_nH.detach()], head.select_own(turns_N))
        else:
            values = self.value_head(hidden_nH)
        logprobs, entropies, values = head.gather([logprobs, entropies, values])
        returned = None if return_lower is None else activations
        return PolicyOutput(logprobs, entropies, values, returned, own_labels, label_logprobs)

    @property
    def decoder(self) -> Any:
        """The language model's embeddings, layers and last norm, part of `vlm`."""
        return self.family.decoder(self.vlm)

    @property
    def tower(self) -> Any:
        """The vision tower, part of `vlm`; None for a text model."""
        return self.family.tower(self.vlm)

    @property
    def has_deep_critic(self) -> bool:
        """Tell whether the critic reads several layers; its loss then does not train the policy's layers."""
        return isinstance(self.value_head, DeepCritic)

    def _lower_activations(
        self, batch: Microbatch, known: LowerActivations | None, num_layers: int
    ) -> LowerActivations:
        """Return `known`, or compute the tower and the first `num_layers` layers.

        If `known` holds no layers, only its tower outputs are used: the embeddings are this policy's own.
        """
        if known is not None and known.num_layers:
            return known
        vision = (self._run_tower(batch) if self.tower is not None else None) if known is None else known.vision
        embeds_1TH = self._embed(batch, vision)
        rotary = self.decoder.rotary_emb(embeds_1TH, self.family.rotary_positions(batch.position_ids[1:]))
        self.listener.listen(batch.predictors)
        hidden_1TH = self._run_layers(embeds_1TH, range(num_layers), batch, vision, rotary)
        return LowerActivations(vision, rotary, num_layers, hidden_1TH, self.listener.take())

    def _final_hidden(self, batch: Microbatch, lower: LowerActivations) -> tuple[Tensor, list[Tensor]]:
        """Return the final hidden states [N,H] that predict the sampled tokens, and the lower layers' states that a
        critic reads.

        On a rank of a context group, these are only the predictions of its own tokens.
        """
        text = self.decoder
        if self.has_deep_critic:
            self.listener.listen(batch.predictors)
        upper = range(lower.num_layers, len(text.layers))
        hidden = text.norm(self._run_layers(lower.hidden_1TH, upper, batch, lower.vision, lower.rotary)).squeeze(0)
        critic_states = [*lower.critic_states, *self.listener.take()]
        return hidden if self.trimmed else hidden.index_select(0, batch.predictors), critic_states

    def _run_layers(
        self, hidden_1TH: Tensor, layers: range, batch: Microbatch, vision: Vision, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Run some decoder layers; the deepstack's features are added after the first ones."""
        text, deepstack = self.decoder, [] if vision is None else vision[1]
        for index in layers:
            trims = self.trimmed and index == len(text.layers) - 1
            rows = {"rows": batch.predictors} if trims else {}
            arguments = {"attention_mask": None, "position_embeddings": rotary, "packing": batch.packing}
            hidden_1TH = text.layers[index](hidden_1TH, **arguments, **rows)
            if index < len(deepstack) and len(batch.visual_rows):
                features_MH = deepstack[index].to(hidden_1TH.dtype)
                hidden_1TH = hidden_1TH.index_add(1, batch.visual_positions, features_MH[None])
        return hidden_1TH

    def _embed(self, batch: Microbatch, vision: Vision) -> Tensor:
        """Return the tokens' embeddings [1,T,H], with the tower's features at the positions of visual tokens."""
        embeds_TH = self.decoder.embed_tokens(batch.input_ids).squeeze(0)
        if vision is None:
            return embeds_TH[None]
        features, deepstack = vision
        if len(batch.visual_rows):
            return embeds_TH.index_copy(0, batch.visual_positions, features.to(embeds_TH.dtype))[None]
        # The tower's parameters take part in every step, here with gradient 0.
        return (embeds_TH + 0.0 * sum(x.sum() for x in (features, *deepstack)))[None]

    def _run_tower(self, batch: Microbatch) -> Vision:
        """Return the tower's features of the images, or of a blank image if there is none.

        If ranks share the microbatch, each computes some of the images, and gets the features that its tokens read.
        """
        patches, spec = batch.patches, self.spec
        if not batch.image_lengths:
            patches = patches.new_zeros(spec.merge_size**2, *patches.shape[1:])
        if spec.window_tokens and batch.tower.packing.windows is None:
            raise ValueError("the microbatch was packed for a tower without windows; pack it with the policy's spec")
        vision = self.tower(patches, **batch.tower.arguments())
        deepstack = list(getattr(vision, "deepstack_features", None) or ())
        features, rows = vision.pooler_output, batch.visual_rows
        if batch.shard is not None and batch.shard.exchange is not None:
            joined = exchanged(torch.cat((features, *deepstack), -1), batch.shard.exchange, batch.shard)
            features, *deepstack = joined.tensor_split(1 + len(deepstack), dim=-1)
        elif not batch.image_lengths:
            return features, deepstack
        return features[rows], [layer[rows] for layer in deepstack]

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the language model's parameters under transformers' names, without a tied output head.

        The factors of adapters are left out too: they are part of the weights that they adapt.
        """
        yield from ((name, p) for name, p in self.vlm.named_parameters() if not is_factor(name))


def load_policy(path: str, spec: VisionSpec, critic_width: int = 0) -> Policy:
    """Load the model in a folder as float32 on the CPU. Raise ValueError if its family is unknown or its weights do not
    fit."""
    policy = empty_policy(path, spec, critic_width)
    load_weights(policy, path, torch.device("cpu"))
    return policy


def empty_policy(path: str, spec: VisionSpec, critic_width: int = 0) -> Policy:
    """Return a model's policy whose parameters, except the critic's, have shapes but no memory (torch's device `meta`).

    Raise ValueError if the folder's config.json cannot be read or names no known family.
    """
    family = family_in(path)
    family.prepare()
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"model.path = {path!r} holds no readable config.json: {reason}") from error
    with torch.device("meta"):
        vlm = getattr(transformers, family.auto_class).from_config(config, dtype=torch.float32)
    return Policy(vlm.eval(), spec, critic_width)


@torch.no_grad()
def load_weights(policy: Policy, path: str, device: torch.device, *, offload: bool = False) -> None:
    """Load the weights of the folder into an empty policy, sharded or not: each rank reads its shard of one tensor at a
    time.

    `offload`: shards are on the CPU. Raise ValueError, before any memory is allocated, if the folder does not hold the
    weights of its config.json.
    """
    parameters, tied = dict(policy.named_weights()), "lm_head.weight"
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    files = WeightFiles.open(path, policy.family, shapes, also=(tied,))
    try:
        materialize(policy, policy.vlm, device, offload=offload)
        for name, parameter in policy.named_weights():
            local, index = local_part(parameter)
            local.copy_(files.read(name, index).to(local.device))
        if tied in files.stored and tied not in parameters:
            _check_tied(policy, files, tied)
    finally:
        files.close()


def _check_tied(policy: Policy, files: WeightFiles, name: str) -> None:
    """Raise ValueError unless the output head in the files equals the embeddings, to which the config ties it."""
    local, index = local_part(policy.vlm.lm_head.weight)
    if files.stored[name].shape != tuple(policy.vlm.lm_head.weight.shape) or not torch.equal(
        files.read(name, index).to(local.device, local.dtype), local
    ):
        raise ValueError(
            f"model.path = {str(files.folder)!r} holds a {name} that differs from the embeddings, but its config.json "
            "says tie_word_embeddings = true; set it to false there"
        )
