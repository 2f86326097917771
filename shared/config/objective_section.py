"""The learner's objective: the section learner.objective of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from shared.config.objective_specs import OBJECTIVES, ObjectiveSpec, names_with_critic, objective_spec
from shared.config.sections import Section


class ObjectiveConfig(Section):
    """The objective's settings: advantages, importance weights and clips, and the terms beside the policy's."""

    name: str = Field(
        "vtrace",
        description=f"one of {', '.join(OBJECTIVES)}: the first two have a critic, the others are group-relative; sft "
        "imitates demonstrations (launch/sft.py)",
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean",
        description="what weighs the same in the loss: each token, or each episode; constant: the sum over an "
        "episode's tokens is divided by aggregation_divisor, however many they are",
    )
    aggregation_divisor: int = Field(
        1024, gt=0, description="aggregation = constant: the divisor, such as the most tokens that an episode may have"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="discount between turns (1 inside a turn)")
    lam: float = Field(1.0, ge=0, le=1, description="lambda between turns: how far targets look ahead")
    correction: Literal["importance", "none"] = Field(
        "importance", description="none takes every token for the current policy's own, however old: to compare with"
    )
    rho_bar: float | None = Field(1.0, gt=0, description="truncation of rho in the targets; null = none")
    c_bar: float | None = Field(1.0, ge=0, description="truncation of c, how fast corrections fade; null = none")
    pg_rho_bar: float | None = Field(
        1.0, gt=0, description="truncation of the importance weight of the policy gradient"
    )
    rho_noise: float = Field(
        0.0,
        ge=0,
        description="vtrace: |log rho| up to this counts as 0; 0.08 in bfloat16, whose noise ends traces",
    )
    proximal: Literal["behaviour", "learner"] = Field(
        "behaviour",
        description="what clips compare the policy with: the actors' logprobs, or the policy as the step began",
    )
    mask_token_ratio: tuple[float, float] | None = Field(
        None, description="tokens whose pi/mu is outside of [low, high] are left out; null = none"
    )
    mask_sequence_ratio: tuple[float, float] | None = Field(
        None, description="episodes whose pi/mu is outside in the geometric mean over tokens are left out; null = none"
    )
    mask_veto_ratio: float | None = Field(
        None, gt=0, lt=1, description="episodes with any token whose pi/mu is below are left out; null = none"
    )
    vtrace_level: Literal["token", "turn"] = Field("token", description="vtrace, ppo: what counts as one action")
    turn_ratio: Literal["geometric", "product"] = Field(
        "geometric",
        description=(
            "vtrace, ppo by turns: how the tokens' ratios make the turn's ratio (product: exact, large variance)"
        ),
    )
    clip_low: float = Field(0.2, ge=0, le=1, description="ratios below 1 - clip_low get no gradient (cispo: all do)")
    clip_high: float = Field(0.28, ge=0, description="ratios above 1 + clip_high get no gradient (cispo: count as it)")
    sapo_tau_positive: float = Field(
        1.0, gt=0, description="sapo: how fast the weight of a token with advantage > 0 fades as its ratio leaves 1"
    )
    sapo_tau_negative: float = Field(1.05, gt=0, description="sapo: the same for advantage < 0")
    divergence_bound: float = Field(
        0.2,
        gt=0,
        le=1,
        description="dppo: a token whose probability has moved by more than this in its advantage's direction gets no "
        "gradient",
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description=("tokens with a negative advantage and a ratio above this get no gradient; null = no limit"),
    )
    vtrace_clip: bool = Field(
        True, description="vtrace: clip as the three above say, beside pg_rho_bar; false: as its paper has it"
    )
    divide_by_std: bool = Field(True, description="group-relative: divide advantages by the group's deviation")
    leave_one_out: bool = Field(False, description="group-relative: the baseline is the mean of the other episodes")
    turn_advantage: Literal["none", "returns", "state"] = Field(
        "none",
        description="group-relative: what turns add to their episode's advantage. returns: each turn's return (gamma) "
        "compared with those of the same turn of the group's other episodes; state: with those of all turns of the "
        "group in the same state (GiGPO), which needs info['state']",
    )
    turn_weight: float = Field(1.0, ge=0, description="turn_advantage: its weight beside the episode's advantage")
    keep_variance: float = Field(
        1.0,
        gt=0,
        le=1,
        description="group-relative: a step learns from the groups whose rewards vary most, as few as have this share "
        "of all variance; the others count in what the loss is divided by",
    )
    dynamic_sampling: bool = Field(
        False, description="group-relative: groups of equal rewards are replaced by fresh ones, and counted"
    )
    overlong: Literal["train", "mask", "penalise"] = Field(
        "train", description="episodes cut off by a token limit: as others, no gradient, or less reward"
    )
    overlong_penalty: float = Field(1.0, ge=0, description="what `penalise` takes off the reward")
    overlong_tokens: int = Field(
        0, ge=0, description="penalise: sampled tokens of an episode that cost the whole penalty"
    )
    overlong_buffer: int = Field(
        0, ge=0, description="penalise: tokens before overlong_tokens over which the penalty grows; 0 = only if cut off"
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of KL(policy, reference); 0 = no reference is computed")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="of that KL, per sampled token; the gradient of k3 has no bound where the policy has moved far",
    )
    kl_max_entropy: float | None = Field(
        None,
        gt=0,
        description=(
            "nats: the KL is computed only on tokens where the reference's entropy is at most "
            "this, so that it preserves what the reference is sure of; null = all tokens"
        ),
    )
    kl_reference_every: int = Field(
        0, ge=0, description="steps after which the reference becomes the policy of then; 0 = always the initial policy"
    )
    hold_coef: float = Field(
        0.0,
        ge=0,
        description=(
            "weight of -log policy probability of the token that the reference is sure of, sampled or not; 0 = off"
        ),
    )
    hold_probability: float = Field(
        0.9, gt=0.5, lt=1, description="hold_coef: the reference is sure of a token of at least this probability"
    )
    teacher: str = Field(
        "",
        description=(
            "folder of a frozen model of the same vocabulary and images, from which the policy learns on its own "
            "episodes, with rewards or without; self = the policy itself, which reads the environment's hints; empty = "
            "none"
        ),
    )
    teacher_weight: float = Field(1.0, gt=0, description="teacher: weight of the KL to it")
    teacher_kl: Literal["reverse", "forward"] = Field(
        "reverse",
        description="teacher: KL(policy, teacher), which keeps to what the teacher does, or KL(teacher, policy), which "
        "covers all that it does; both from the sampled tokens",
    )
    reward_weight: float = Field(
        1.0, ge=0, description="teacher: weight of what rewards teach (policy term and critic); 0 = the teacher alone"
    )
    kl_in_reward: bool = Field(
        False, description="subtract the KL (k1) from the rewards instead of adding it to the loss"
    )
    normalize_advantages: bool = Field(
        True,
        description=(
            "vtrace, ppo: subtract the turn's running mean from advantages and divide by their running deviation"
        ),
    )
    advantage_memory: float = Field(
        0.9, ge=0, lt=1, description="vtrace, ppo: memory of the advantages' running moments"
    )
    advantage_floor: float = Field(
        0.1,
        ge=0,
        description=(
            "a deviation of advantages (in a group: of rewards) below this share of the returns' (rewards') running "
            "deviation, or below 0.03, counts as noise: it is not scaled to unit size, and the policy's learning rate "
            "shrinks with it; 0 = never"
        ),
    )
    value_coef: float = Field(0.5, ge=0, description="vtrace, ppo: weight of the value loss")
    value_clip: float | None = Field(
        None, gt=0, description="vtrace, ppo: value errors beyond count linearly; null = squared throughout"
    )
    critic_width: int = Field(
        0,
        ge=0,
        description=(
            "vtrace, ppo: width of a critic that reads several layers and the turn; 0 = linear "
            "critic on the final state"
        ),
    )
    passes: int = Field(1, gt=0, description="times that a step trains on each of its episodes")
    minibatches: int = Field(1, gt=0, description="updates of one pass, each on its share of the episodes")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    min_entropy: float = Field(
        0.0,
        ge=0,
        description=("nats: the policy term uses only tokens where the policy's entropy is at least this; 0 = all"),
    )
    reward_scale: float = Field(1.0, description="vtrace, ppo: rewards are multiplied by this")
    turn_rewards: bool = Field(
        True, description="vtrace, ppo: train on the rewards of turns; false = the episode's at the end"
    )

    @property
    def spec(self) -> ObjectiveSpec:
        """The objective's entry in the registry."""
        return objective_spec(self.name)

    @property
    def is_group_relative(self) -> bool:
        """True where advantages compare the episodes of one sample."""
        return self.spec.is_group_relative

    @property
    def has_critic(self) -> bool:
        """True where a value head is read and trained."""
        return self.spec.has_critic

    @property
    def needs_variance(self) -> bool:
        """True where episodes teach nothing if all of them earned the same."""
        return self.spec.learns_from_rewards and not self.has_teacher

    @property
    def has_teacher(self) -> bool:
        """True where a teacher's log-probabilities of the policy's tokens take part."""
        return bool(self.teacher)

    @property
    def teacher_folder(self) -> str:
        """Return the folder of the frozen teacher; "" if there is none."""
        return "" if self.teaches_itself else self.teacher

    @property
    def teaches_itself(self) -> bool:
        """True where the policy that reads hints is its own teacher."""
        return self.teacher == "self"

    @property
    def has_reference(self) -> bool:
        """True where a frozen reference policy takes part."""
        return self.kl_coef != 0 or self.hold_coef != 0

    @property
    def has_turn_advantages(self) -> bool:
        """True where turns of a group's episodes are compared with each other."""
        return self.turn_advantage != "none" and self.turn_weight > 0

    @property
    def clips(self) -> bool:
        """True if, with these settings, tokens lose their gradient because of their ratio."""
        return self.spec.clips and (not self.spec.clip_setting or bool(getattr(self, self.spec.clip_setting)))

    @property
    def couples_tokens(self) -> bool:
        """True if a token's loss depends on the probabilities or values of its episode's other turns."""
        masks_episodes = self.mask_sequence_ratio is not None or self.mask_veto_ratio is not None
        return self.has_critic or self.spec.has_episode_ratios or masks_episodes

    @property
    def skips_zero_advantage(self) -> bool:
        """True if the loss of an episode with advantage 0 is exactly 0, whatever probabilities the policy gives its
        tokens."""
        return (
            self.spec.zero_advantage_means_zero_loss
            and self.entropy_coef == 0
            and not (self.has_reference or self.has_teacher)
        )

    @model_validator(mode="before")
    @classmethod
    def _has_what_its_name_implies(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, dict) else None
        return {**OBJECTIVES[name].implied, **values} if isinstance(name, str) and name in OBJECTIVES else values

    @field_validator("name")
    @classmethod
    def _is_registered(cls, value: str) -> str:
        return objective_spec(value).name

    @model_validator(mode="after")
    def _no_setting_contradicts_another(self) -> Self:
        wrongs = (*self._wrong_implied(), *self._wrong_ratios(), *self._wrong_masks(), *self._wrong_rewards())
        for wrong, reason in (*wrongs, *self._wrong_teacher()):
            if wrong:
                raise ValueError(f"learner.objective.{reason}")
        return self

    def _wrong_implied(self) -> Iterator[tuple[bool, str]]:
        for setting, value in self.spec.implied.items():
            given = getattr(self, setting)
            yield (
                given != value,
                f"{setting} = {given!r}: {self.name} is what it is by {setting} = {value!r}; leave it out, or choose "
                "another learner.objective.name",
            )

    def _wrong_ratios(self) -> Iterator[tuple[bool, str]]:
        """Yield (whether settings contradict one another, the message for it); a message begins with a setting's
        name."""
        yield (
            self.critic_width > 0 and not self.has_critic,
            f"critic_width = {self.critic_width}: {self.name} trains no critic; set it to 0, or name to "
            f"{names_with_critic()}",
        )
        yield (
            self.critic_width > 0 and self.value_coef == 0,
            f"critic_width = {self.critic_width} with value_coef = 0: that critic would never learn; raise the latter",
        )
        yield (
            self.proximal == "learner" and self.spec.clips and not self.clips,
            f"proximal = 'learner' is what clips compare the policy with, and {self.name} clips nothing while "
            f"{self.spec.clip_setting} = false; set that to true, or proximal to 'behaviour'",
        )
        yield (
            self.proximal == "learner" and not self.spec.clips,
            f"proximal = 'learner' is what clips compare the policy with, and {self.name} clips no gradient; set "
            "proximal to 'behaviour', or name to an objective that clips",
        )
        yield (
            self.passes > 1 and self.correction == "none" and self.proximal == "behaviour",
            f"passes = {self.passes} with correction = 'none': nothing would tell how far later passes are from the "
            "policy that played; set correction to 'importance', or proximal to 'learner'",
        )
        yield (
            self.rho_noise > 0 and (not self.spec.has_traces or self.correction == "none"),
            f"rho_noise = {self.rho_noise} with name = {self.name!r}, correction = {self.correction!r}: only vtrace "
            "with importance correction has traces of rho; set it to 0",
        )

    def _wrong_masks(self) -> Iterator[tuple[bool, str]]:
        for name in ("mask_token_ratio", "mask_sequence_ratio", "mask_veto_ratio"):
            bounds = getattr(self, name)
            yield (
                bounds is not None and self.correction == "none",
                f"{name} = {bounds} with correction = 'none', which takes every ratio for 1: nothing would ever be "
                "left out; set one of them back",
            )
            yield (
                isinstance(bounds, tuple) and not 0 < bounds[0] < 1 < bounds[1],
                f"{name} = {bounds}: a policy that has not moved has the ratio 1; set 0 < low < 1 < high",
            )

    def _wrong_teacher(self) -> Iterator[tuple[bool, str]]:
        for name in ("teacher_weight", "teacher_kl", "reward_weight"):
            value = getattr(self, name)
            yield (
                value != type(self).model_fields[name].default and not self.has_teacher,
                f"{name} = {value!r} without a teacher: set teacher to a model's folder, or leave it out",
            )
        yield (
            self.has_teacher and not self.spec.learns_from_rewards,
            f"teacher = {self.teacher!r} with name = {self.name!r}, which learns from others' tokens: a teacher judges "
            "the policy's own; leave it out, or set another name",
        )
        yield (
            self.reward_weight == 0 and self.dynamic_sampling,
            "reward_weight = 0 with dynamic_sampling = true: no group is refused for its rewards then; set the latter "
            "to false",
        )

    def _wrong_rewards(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.turn_advantage != "none" and not self.is_group_relative,
            f"turn_advantage = {self.turn_advantage!r} is for group-relative objectives, and {self.name} has a critic "
            "that tells turns apart; set it to 'none', or learner.objective.name",
        )
        yield (
            self.dynamic_sampling and not self.is_group_relative,
            "dynamic_sampling = true is for group-relative objectives; set learner.objective.name",
        )
        yield (
            self.overlong_buffer > 0 and self.overlong != "penalise",
            f"overlong_buffer = {self.overlong_buffer} is of a penalty, and overlong = {self.overlong!r}; set that to "
            "'penalise'",
        )
        yield (
            (self.overlong_buffer > 0) != (self.overlong_tokens > 0) or self.overlong_tokens < self.overlong_buffer,
            f"overlong_buffer = {self.overlong_buffer} with overlong_tokens = {self.overlong_tokens}: the penalty "
            "grows over the last overlong_buffer of so many tokens; set both, the first no larger",
        )
        for name, value in (
            ("kl_in_reward", self.kl_in_reward),
            ("kl_reference_every", self.kl_reference_every),
            ("kl_max_entropy", self.kl_max_entropy),
        ):
            yield (
                bool(value) and self.kl_coef == 0 and not (name == "kl_reference_every" and self.hold_coef),
                f"{name} = {value} with kl_coef = 0: no KL is computed; set kl_coef",
            )
        yield (
            self.kl_max_entropy is not None and (self.kl_in_reward or self.passes > 1),
            f"kl_max_entropy = {self.kl_max_entropy} needs the reference's entropies, which only a term of the loss "
            "and a single pass have; set kl_in_reward to false and passes to 1",
        )
        yield (
            self.keep_variance < 1 and (not self.is_group_relative or self.spec.whitens or self.kl_in_reward),
            f"keep_variance = {self.keep_variance} with name = {self.name!r}, kl_in_reward = {self.kl_in_reward}: it "
            "needs advantages relative to groups alone; set it to 1, or kl_in_reward to false, or name to 'grpo'",
        )
        yield (
            self.kl_in_reward and self.spec.whitens,
            f"kl_in_reward = true with name = {self.name!r}, which divides advantages by the deviation of the step's "
            "before the KL is known; set kl_in_reward to false",
        )
        yield (
            self.kl_in_reward and self.is_group_relative and self.divide_by_std,
            "kl_in_reward = true with divide_by_std = true: in a group of equal rewards the noise of the KL would be "
            "blown up to unit size; set divide_by_std to false",
        )
