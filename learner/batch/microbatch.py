"""One microbatch: packed episodes as the tensors that a forward and the loss need.

Shape suffixes: T = tokens of the microbatch, N = its sampled tokens, P = patches of its distinct images, I = its
distinct images, M = its visual tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from learner.batch.context_shard import ContextShard
from learner.batch.packing import Packing
from learner.batch.to_device import HOST_ONLY
from learner.batch.vision_inputs import TowerInputs


@dataclass(frozen=True, slots=True, eq=False)
class WholeEpisodes:
    """The sampled tokens of whole episodes, for a microbatch with pieces of some. W = tokens of one episode after the
    other, once for each piece; N = those of them that the microbatch computes."""

    own: Tensor  # int64 [N], positions among the W
    behaviour_logprobs: Tensor  # float32 [W]
    versions: Tensor  # int32 [W]
    rewards: Tensor  # float32 [W]
    turn_end: Tensor  # bool [W]
    episode_end: Tensor  # bool [W]
    sampled: tuple[int, ...]  # sampled tokens of each episode


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Packed documents, one after another, as tensors on one device; only the ids that kernels check stay on the host.
    A document is an episode, or one segment of an episode that has several; of an episode that is longer than a
    microbatch, a microbatch has some segments (a piece).

    All that follows from lengths and grids is computed in advance, so that no forward waits for a device. `empty` marks
    a stand-in without any episode.

    With a `shard`, T, P, I and M are this rank's parts: `predictors` are those of its tokens, [max(n,1)], and
    `visual_rows` are rows of the ranks' exchange. `lengths` and all that is [N] remain those of the microbatch. If the
    packing has `prefixes`, T and M count only the tokens that are computed; `lengths` are those of whole documents.
    """

    input_ids: Tensor  # int64 [1,T]
    position_ids: Tensor  # int64 [4,1,T]
    lengths: tuple[int, ...]  # tokens of each document
    packing: Packing  # borders of the documents
    patches: Tensor  # uint8 [P,3,patch,patch], of distinct images
    tower: TowerInputs  # inputs for these images, or for a blank image if there is none
    image_lengths: tuple[int, ...]  # patches of each distinct image
    visual_positions: Tensor  # int64 [M], positions of visual tokens among the T
    visual_rows: Tensor  # int64 [M], row of the tower's output for each visual token
    predictors: Tensor  # int64 [N], positions whose hidden state predicts a sampled token
    target_ids: Tensor = field(metadata=HOST_ONLY)  # int64 [N]
    asked_ids: Tensor = field(metadata=HOST_ONLY)  # int64 [N], with a shard [max(n,1)]: targets of the predictors
    behaviour_logprobs: Tensor  # float32 [N]
    versions: Tensor  # int32 [N]
    rewards: Tensor  # float32 [N]
    turn_end: Tensor  # bool [N]
    episode_end: Tensor  # bool [N]
    advantages: Tensor  # float32 [N], relative to the group
    episode_tokens: Tensor  # float32 [N], sampled tokens of the token's episode
    readable: Tensor  # float32 [N], 0 if the episode has an image that this rank cannot decode, else 1
    sampled: tuple[int, ...]  # sampled tokens of each episode
    empty: bool
    # for each episode its index among the step's trajectories, in the order of this microbatch
    indices: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()  # for each the index of its first token among those of its whole episode
    whole: WholeEpisodes | None = None  # None if no episode is only a piece
    proximal_logprobs: Tensor | None = None  # float32 [N], if computed before the step's first update
    reference_logprobs: Tensor | None = None  # float32 [N], if computed before the step's first update
    teacher_logprobs: Tensor | None = None  # float32 [N], of the frozen teacher, if there is one
    teacher_baselines: Tensor | None = None  # float32 [N], means of log mu/teacher in the step
    shard: ContextShard | None = None  # this rank's part, if ranks share the microbatch

    @property
    def num_tokens(self) -> int:
        return 0 if self.empty else self.target_ids.shape[0]
