"""The policy: a Qwen-VL model with a value head, on packed documents.

Shape suffixes: T = packed tokens, N = sampled tokens, n = those that this rank predicts, H = hidden size,
V = vocabulary, P = patches, M = visual tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from learner.batch import Microbatch
from learner.lora.adapters import Adapters, is_factor
from learner.model.adapt import adapt, materialize
from learner.model.critic import DeepCritic, LinearCritic, Listener, chosen_layers
from learner.model.said import Head
from learner.model.weight_files import WeightFiles, local_part
from learner.objective.records import Labels
from learner.packing.tower import with_tower
from learner.parallel.collectives import exchanged
from learner.vtrace import turn_indices
from shared.vision import VisionSpec
from shared.weights.families import FAMILIES


class PolicyOutput(NamedTuple):
    """All float32 [N], differentiable: of the sampled tokens, at the temperature they were sampled with."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    below: Below | None = None  # what its first layers computed, where `keep` asks for it
    labels: Labels | None = None  # what it is sure of, where `sure` asks for it
    label_logprobs: Tensor | None = None  # float32 [K], differentiable: of the labels that were not sampled


Vision = tuple[Tensor, list[Tensor]]
"""Features of visual tokens [M,H], and each deepstack layer's."""


@dataclass(frozen=True, slots=True, eq=False)
class Below:
    """What a policy's tower and first decoder layers made of a microbatch: for another policy that has the same."""

    vision: Vision
    turns: tuple[Tensor, Tensor]  # the rotary embedding
    num_layers: int
    hidden_1TH: Tensor  # what the next layer reads
    heard: list[Tensor]  # what a critic reads of these layers


class Policy(nn.Module):
    """`forward` gives logprobs, entropies and values of a microbatch's sampled tokens; logits are never kept."""

    def __init__(self, vlm: PreTrainedModel, spec: VisionSpec, critic_width: int = 0) -> None:
        """`critic_width`: of a critic that reads several layers; 0 = a linear one on the final hidden state."""
        super().__init__()
        self.vlm = vlm
        self.spec = spec = with_tower(spec, vlm.config.vision_config)
        self.dtype = torch.float32  # of forward and backward, and of what engines are given
        self.adapters: Adapters | None = None  # what is trained of `vlm`, where not its weights are
        self.trimmed = adapt(vlm, spec)  # whether the last layer takes `rows=`
        hidden_size, layers = vlm.config.text_config.hidden_size, vlm.model.language_model.layers
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
        below: Below | None = None,
        *,
        keep: int | None = None,
        sure: float | None = None,
        labels: Labels | None = None,
    ) -> PolicyOutput:
        """`below`: of a policy whose tower and first layers are the same; they are not computed again. `keep`: of how
        many layers the output has it, without gradient. `sure`: the probability of a token from which on it is a
        label. `labels`: of another policy, whose logprobs are wanted."""
        lower = self._below(batch, below, keep or 0)
        hidden_nH, heard = self._hidden(batch, lower)
        head = Head(self.vlm.lm_head.weight, temperature, self.banned_ids, batch.share)
        logprobs, entropies = head.logprobs(hidden_nH, batch.asked_ids)
        own = None if sure is None else head.sure_of(hidden_nH, logprobs, sure)
        of_labels = None if labels is None else head.of_labels(hidden_nH, labels)
        if self.has_deep_critic:
            turns_N = turn_indices(batch.turn_end, batch.episode_end)
            values = self.value_head([*heard, hidden_nH.detach()], head.own(turns_N))
        else:
            values = self.value_head(hidden_nH)
        logprobs, entropies, values = head.whole([logprobs, entropies, values])
        return PolicyOutput(logprobs, entropies, values, None if keep is None else lower, own, of_labels)

    @property
    def has_deep_critic(self) -> bool:
        """Whether its critic reads several layers, and is trained apart from them."""
        return isinstance(self.value_head, DeepCritic)

    def _below(self, batch: Microbatch, known: Below | None, num_layers: int) -> Below:
        """What is `known`; otherwise it is computed. Where no layer of it is known, only the tower's part is taken: the
        embeddings are this policy's own."""
        if known is not None and known.num_layers:
            return known
        vision = self._vision(batch) if known is None else known.vision
        embeds_1TH = self._embedded(batch, vision)
        turns = self.vlm.model.language_model.rotary_emb(embeds_1TH, batch.position_ids[1:])
        self.listener.listen(batch.predictors)
        hidden_1TH = self._decoded(embeds_1TH, range(num_layers), batch, vision, turns)
        return Below(vision, turns, num_layers, hidden_1TH, self.listener.take())

    def _hidden(self, batch: Microbatch, below: Below) -> tuple[Tensor, list[Tensor]]:
        """Final hidden states [N,H] that predict the sampled tokens, of a share those of this rank's tokens; and what
        a critic reads of the layers before the last."""
        text = self.vlm.model.language_model
        if self.has_deep_critic:
            self.listener.listen(batch.predictors)
        above = range(below.num_layers, len(text.layers))
        hidden = text.norm(self._decoded(below.hidden_1TH, above, batch, below.vision, below.turns)).squeeze(0)
        heard = [*below.heard, *self.listener.take()]
        return hidden if self.trimmed else hidden.index_select(0, batch.predictors), heard

    def _decoded(
        self, hidden_1TH: Tensor, layers: range, batch: Microbatch, vision: Vision, turns: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Through some decoder layers, after the first of which the deepstack's features are added."""
        text, (_, deepstack) = self.vlm.model.language_model, vision
        for index in layers:
            trims = self.trimmed and index == len(text.layers) - 1
            rows = {"rows": batch.predictors} if trims else {}
            known = {"attention_mask": None, "position_embeddings": turns, "packing": batch.packing}
            hidden_1TH = text.layers[index](hidden_1TH, **known, **rows)
            if index < len(deepstack) and len(batch.visual_rows):
                features_MH = deepstack[index].to(hidden_1TH.dtype)
                hidden_1TH = hidden_1TH.index_add(1, batch.visual_positions, features_MH[None])
        return hidden_1TH

    def _embedded(self, batch: Microbatch, vision: Vision) -> Tensor:
        """The tokens' embeddings [1,T,H], with the tower's features in the places of visual tokens."""
        embeds_TH = self.vlm.model.language_model.embed_tokens(batch.input_ids).squeeze(0)
        features, deepstack = vision
        if len(batch.visual_rows):
            return embeds_TH.index_copy(0, batch.visual_positions, features.to(embeds_TH.dtype))[None]
        # the tower's parameters take part in every step, with gradient 0
        return (embeds_TH + 0.0 * sum(x.sum() for x in (features, *deepstack)))[None]

    def _vision(self, batch: Microbatch) -> Vision:
        """What the tower makes of the images; of a blank one if there is none. Where ranks share the microbatch, each
        computes some images, and has of all what its tokens read."""
        patches, spec = batch.patches, self.spec
        if not batch.image_lengths:
            patches = patches.new_zeros(spec.merge_size**2, *patches.shape[1:])
        if spec.window_tokens and batch.tower.packing.windows is None:
            raise ValueError("the microbatch was packed for a tower without windows; pack it with the policy's spec")
        vision = self.vlm.model.visual(patches, **batch.tower.arguments())
        deepstack = list(getattr(vision, "deepstack_features", None) or ())
        features, rows = vision.pooler_output, batch.visual_rows
        if batch.share is not None and batch.share.exchange is not None:
            joined = exchanged(torch.cat((features, *deepstack), -1), batch.share.exchange, batch.share)
            features, *deepstack = joined.tensor_split(1 + len(deepstack), dim=-1)
        elif not batch.image_lengths:
            return features, deepstack
        return features[rows], [layer[rows] for layer in deepstack]

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The language-vision model's parameters under transformers' names; a tied output head is left out. Without the
        factors of adapters, which are part of the weights that they adapt."""
        yield from ((name, p) for name, p in self.vlm.named_parameters() if not is_factor(name))


def load_policy(path: str, spec: VisionSpec, critic_width: int = 0) -> Policy:
    """Loads a Qwen3-VL (dense or mixture of experts) or Qwen2.5-VL model from a folder, as float32 on the CPU."""
    policy = empty_policy(path, spec, critic_width)
    load_weights(policy, path, torch.device("cpu"))
    return policy


def empty_policy(path: str, spec: VisionSpec, critic_width: int = 0) -> Policy:
    """A model's policy whose parameters have shapes and no memory yet (torch's device `meta`), but for the critic's."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"model.path = {path!r} holds no readable config.json: {reason}") from error
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model.path = {path!r} is a {config.model_type!r} model; the learner trains {', '.join(FAMILIES)}"
        )
    with torch.device("meta"):
        vlm = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return Policy(vlm.eval(), spec, critic_width)


@torch.no_grad()
def load_weights(policy: Policy, path: str, device: torch.device, *, offload: bool = False) -> None:
    """Gives an empty policy, sharded or not, the weights of the folder: each rank reads its shards of one tensor after
    the other. `offload`: shards lie on the CPU.

    ValueError, before any memory is taken: the folder does not hold the weights of its config.json.
    """
    parameters, tied = dict(policy.named_weights()), "lm_head.weight"
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    files = WeightFiles.open(path, FAMILIES[policy.vlm.config.model_type], shapes, also=(tied,))
    try:
        materialize(policy, policy.vlm, device, offload=offload)
        for name, parameter in policy.named_weights():
            mine, index = local_part(parameter)
            mine.copy_(files.read(name, index).to(mine.device))
        if tied in files.stored and tied not in parameters:
            _check_tied(policy, files, tied)
    finally:
        files.close()


def _check_tied(policy: Policy, files: WeightFiles, name: str) -> None:
    """ValueError unless the head that the files hold besides the embeddings is equal to them."""
    mine, index = local_part(policy.vlm.lm_head.weight)
    if files.stored[name].shape != tuple(policy.vlm.lm_head.weight.shape) or not torch.equal(
        files.read(name, index).to(mine.device, mine.dtype), mine
    ):
        raise ValueError(
            f"model.path = {str(files.folder)!r} holds a {name} that differs from the embeddings, but its config.json "
            "says tie_word_embeddings = true; set it to false there"
        )
