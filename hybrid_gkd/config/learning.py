"""The sections distillation, algorithm and reward: what is learned from. See schema.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid_gkd.config import metadata as rules
from hybrid_gkd.losses.table import DIVERGENCES, TOKEN_WEIGHTS, UNIFORM, TokenWeights, token_weights


@dataclass
class DistillationConfig:
    """The distillation loss."""

    enabled: bool = True
    """false needs no teacher: it trains with PPO on the reward, or on given answers by cross-entropy (SFT)."""
    on_policy_fraction: float | None = field(default=None, metadata=rules.SHARE)
    """The share of the tasks with a given answer (data.response_key) that the student answers itself (lambda in arXiv
    2306.13649), drawn anew for each batch; null: none of them."""
    sft_coef: float | None = field(default=None, metadata=rules.NOT_NEGATIVE)
    """Factor of the cross-entropy of given answers, beside the loss that teacher and rewards make; null: 0 with a
    teacher, which scores given answers like any other, and 1 without."""
    loss_mode: str = field(default="forward_kl", metadata=rules.names(*DIVERGENCES, "mixed"))
    """Divergence between teacher and student, see docs/losses.md: on the teacher's candidates (forward_kl,
    reverse_kl, jsd), a weighted sum (mixed), or an estimate from the sampled token (k1, k2, k3)."""
    loss_fn: str | None = field(default=None, metadata=rules.IMPORT_PATH)
    """A divergence of your own in the place of loss_mode: module:name or file.py:name of a function like forward_kl of
    hybrid_gkd/losses/divergence.py."""
    beta: float = field(default=0.5, metadata=rules.SHARE)
    """Weight of the teacher in jsd's mixture; 0 is forward_kl and 1 is reverse_kl."""
    mixed_weights: dict[str, float] = field(default_factory=dict)
    """Weights of loss_mode=mixed, e.g. {forward_kl: 0.5, reverse_kl: 0.5}; of any mode but k1."""
    use_policy_gradient: bool = False
    """Minimise the mean of k1, k2 or k3 over the student's samples, by PPO's clipped loss: the negative advantage of
    the sampled token is the value plus its slope in the student's log-probability. false: the value is the loss."""
    topk: int = field(default=64, metadata=rules.POSITIVE)
    """Teacher candidates per position."""
    tail: Literal["bucket", "none", "renormalise"] = "bucket"
    """The vocabulary outside the top-k: one bucket, left out, or removed from both distributions."""
    temperature: float = field(default=1.0, metadata=rules.POSITIVE)
    """Temperature at which both distributions are compared."""
    distillation_loss_coef: float = field(default=1.0, metadata=rules.POSITIVE)
    """Factor of the loss, or of the reward with as_reward."""
    distillation_loss_coef_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The factor over the run: constant, or from distillation_loss_coef at the first step towards 0 after the last."""
    use_task_rewards: bool = False
    """Add PPO's policy loss on the rule reward."""
    as_reward: bool = False
    """The teacher teaches through rewards: log p - log q of each sampled token is a reward of that token, added to the
    task reward if there is one, from which algorithm.adv_estimator makes advantages; no divergence is minimised."""
    loss_max_clamp: float | None = field(default=None, metadata=rules.POSITIVE)
    """Limit a token's divergence to plus or minus this, nats. A token beyond it has no gradient any more. With
    use_policy_gradient it is the advantage that is limited. actor/distillation/clamp_share says how many tokens are."""
    token_weights: str = field(default=UNIFORM, metadata=rules.names(UNIFORM, *TOKEN_WEIGHTS, or_own=True))
    """Weights of the tokens in the loss, see docs/losses.md: all the same (uniform), or a selection: the beginning of
    each completion (position), where the student's entropy is highest (student_entropy), where the student is certain
    of a token that the teacher finds unlikely (confident_wrong). Or module:name or file.py:name of a function."""
    token_weights_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of token_weights by name: the fraction of each completion's tokens that is selected, by default
    {fraction: 0.3} with position, 0.5 with student_entropy, 0.1 with confident_wrong; anything for a function of your
    own."""

    @property
    def weighting(self) -> TokenWeights | None:
        """The row of token_weights with its arguments; None where all tokens count the same."""
        return token_weights(self.token_weights, self.token_weights_kwargs) if self.enabled else None


ADV_ESTIMATORS = {
    "gae": "critic", "grpo": "group", "rloo": "group", "reinforce_plus_plus": "",
    "reinforce_plus_plus_baseline": "group", "remax": "greedy answer", "opo": "group",
}
"""algorithm.adv_estimator -> what a response is compared with: a critic's values, the other responses to its prompt, or
the greedy answer to it. The functions are in hybrid_gkd/ppo/advantages.py."""


REJECTION_RULES = (
    *(f"token_k{k}" for k in (1, 2, 3)), *(f"seq_sum_k{k}" for k in (1, 2, 3)), *(f"seq_mean_k{k}" for k in (1, 2, 3)),
    "seq_max_k2", "seq_max_k3",
)
"""Of algorithm.rollout_rs: k1, k2 or k3 of a token, or their sum, mean or maximum over its response."""


def rejection_bounds(names: str, limits: Any) -> dict[str, tuple[float, float]]:
    """rollout_rs and rollout_rs_threshold -> by rule the smallest and the largest value that is kept, nats.

    Raises ValueError that says what is wrong.
    """
    chosen, given = [name.strip() for name in names.split(",")], [each.strip() for each in str(limits).split(",")]
    unknown = [name for name in chosen if name not in REJECTION_RULES]
    if unknown:
        raise ValueError(f"rollout_rs must name some of {', '.join(REJECTION_RULES)}, not {unknown[0]!r}")
    if len(given) not in (1, len(chosen)):
        raise ValueError(f"rollout_rs_threshold must give one limit, or one for each of {len(chosen)} rules")
    bounds = {}
    for name, text in zip(chosen, given * len(chosen) if len(given) == 1 else given, strict=True):
        try:
            numbers = [float(part) for part in text.split("_")]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 1 + name.endswith("k1") or not all(0 < number < math.inf for number in numbers):
            shape = "a number or lower_upper" if name.endswith("k1") else "a number"
            raise ValueError(f"rollout_rs_threshold must give {shape} above 0 for {name}, not {text!r}")
        if name.endswith("k1"):
            lower, upper = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
            if lower >= upper:
                raise ValueError(f"rollout_rs_threshold must give {name} a lower bound below the upper, not {text!r}")
            bounds[name] = math.log(lower), math.log(upper)
        else:
            bounds[name] = -math.inf, numbers[0]
    return bounds


@dataclass
class KLCtrlConfig:
    """The coefficient of the KL in the rewards."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: kl_coef stays; adaptive: after every step it is multiplied by 1 + e responses / horizon, where
    e = KL / target_kl - 1, between -0.2 and 0.2 (arXiv 1909.08593). A resumed run goes on with it."""
    kl_coef: float = field(default=0.001, metadata=rules.NOT_NEGATIVE)
    """The coefficient, with adaptive the first one."""
    horizon: int = field(default=10000, metadata=rules.POSITIVE)
    """Responses over which adaptive changes the coefficient by e; larger is slower."""
    target_kl: float = field(default=0.1, metadata=rules.POSITIVE)
    """The KL that adaptive aims at, nats per token."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): no groups without a signal, see docs/losses.md."""

    enable: bool = False
    """Leave out prompts whose responses all have the same metric, and refill the batch with further prompts."""
    metric: str = field(default="seq_reward", metadata=rules.names("acc", "score", "seq_reward"))
    """Of a response: seq_reward is its reward, which advantages come from; score is that without the penalty on long
    responses; acc is the number of that name that a reward function of your own returns, else the score."""
    max_num_gen_batches: int = field(default=10, metadata=rules.POSITIVE)
    """Generation batches that a training step may take; the run ends if they have too few groups with a signal."""


@dataclass
class AlgorithmConfig:
    """Advantages of PPO, and importance weights."""

    adv_estimator: str = field(default="grpo", metadata=rules.names(*ADV_ESTIMATORS, or_own=True))
    """From rewards to advantages, see docs/losses.md: gae (relative to the values of a critic), grpo, rloo, opo,
    reinforce_plus_plus_baseline (to the other responses to the prompt), reinforce_plus_plus (to the batch), remax (to
    the greedy answer), or module:name or file.py:name of a function like grpo of hybrid_gkd/ppo/advantages.py."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo divides by the group's standard deviation; false as in Dr. GRPO."""
    gamma: float = field(default=1.0, metadata=rules.SHARE)
    """Discount of later rewards, per token (reinforce_plus_plus, gae, estimators of your own)."""
    lam: float = field(default=1.0, metadata=rules.SHARE)
    """Decay of later temporal differences, per token (gae, estimators of your own)."""
    use_kl_in_reward: bool = False
    """Take the KL from the student to the reference policy (actor_rollout_ref.ref) off the rewards, token by token,
    before advantages are made of them. Costs two forward passes, one of the reference."""
    kl_penalty: str = field(default="k1", metadata=rules.names("k1", "abs", "k2", "k3"))
    """Its estimate from the sampled token's log-ratio l: k1 is l (verl: kl), abs is |l|, k2 is l^2 / 2 (verl: mse), k3
    is exp(-l) - 1 + l (verl: low_var_kl). Only k1 has the gradient of the KL as a reward."""
    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    rollout_is_threshold: float | None = None
    """Importance weights for the difference between the student and what drew its responses, older weights or the
    engine's arithmetic: every token's loss times min(weight, threshold), threshold >= 1; null: none. Costs a forward
    pass."""
    rollout_is: Literal["prefix", "token", "sequence"] = "prefix"
    """The weight of a token: pi_current / pi_rollout of the response up to it, of the token alone, or of the whole
    response. prefix leaves the token's own ratio out where the loss is of the whole distribution at its position, as a
    divergence is; token is for losses of the sampled token."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Leave out of the loss what differs too much, by rules such as token_k1 or seq_mean_k3, several separated by
    commas, see docs/losses.md. Costs the same forward pass."""
    rollout_rs_threshold: Any = None
    """The limits of rollout_rs: one number for all of its rules, or one for each separated by commas. For k1 bounds of
    the ratio, lower_upper such as 0.5_2.0; a single number u is 1/u_u. For k2 and k3 the largest value, nats."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)

    @property
    def adapts_kl_coef(self) -> bool:
        """Whether the coefficient of the KL in the rewards is state."""
        return self.use_kl_in_reward and self.kl_ctrl.type == "adaptive"

    @property
    def compares_logprobs(self) -> bool:
        """Whether responses need the log-probabilities that the engine and the student give them."""
        return self.rollout_is_threshold is not None or self.rollout_rs is not None


REWARD_FUNCTIONS = {
    "exact_match": True, "gsm8k": True, "math": True, "by_data_source": True, "format": False, "length": False,
}  # fmt: skip
"""The built-in rewards, and whether they need the right answer."""
CUSTOM, MODEL = "custom", "model"
"""What reward.functions calls a function of the user's own, and the reward model."""
REWARD_MODEL_PATH = "reward_model.model.path"
"""The key, for messages."""


@dataclass
class CustomRewardFunction:
    """A reward function of your own, see docs/rewards.md for what it is given."""

    path: str | None = None
    """Python file with the function."""
    name: str = "compute_score"
    """Name of the function."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments that the function is called with, by name."""


@dataclass
class OverlongBufferConfig:
    """Penalty on responses near max_response_length, eq. 13 of arXiv 2503.14476 (DAPO). Training only."""

    enable: bool = False
    """Add it to the reward: 0 up to `len` tokens before data.max_response_length, from there down to -penalty_factor,
    in proportion."""
    len: int = field(default=512, metadata=rules.POSITIVE)
    """Tokens."""
    penalty_factor: float = field(default=1.0, metadata=rules.POSITIVE)
    """The largest penalty, of a response of data.max_response_length tokens."""


@dataclass
class RewardConfig:
    """Reward of a response, for PPO and for validation; see docs/rewards.md."""

    name: str = field(default="exact_match", metadata=rules.names(*REWARD_FUNCTIONS))
    """exact_match compares the stripped response, gsm8k the last number, math the last expression (with math-verify);
    format looks for `reward.format`; length is minus the used share of max_response_length; by_data_source is gsm8k or
    math, whichever the row's data set needs."""
    functions: dict[str, float] = field(default_factory=dict)
    """Several with weights in the place of name: {gsm8k: 1.0, format: 0.2}; your own is called custom, and the reward
    model, which has to be among them if it is enabled, model."""
    answer_key: str | None = None
    """Column with the right answer (dotted for nested ones, e.g. reward_model.ground_truth)."""
    strict: bool = False
    """gsm8k, math and by_data_source give an answer nothing that is not marked as the final one, as in verl: behind
    ####, in \\boxed{}, and for math_dapo and aime* in a line `Answer: ...`."""
    format: str | None = None
    """Regular expression that format looks for in the stripped response; a dot matches line ends too."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    custom_reward_function: CustomRewardFunction = field(default_factory=CustomRewardFunction)
    timeout: float = field(default=60.0, metadata=rules.POSITIVE | rules.MAY_BE_INFINITE)
    """Seconds that a function may take for one response, or a batch function for all; .inf: any. Its process is then
    killed and replaced."""
    score_on_error: float | None = None
    """Reward of a response on which your function raises, does not return in time, or returns no number; null: the run
    ends with an error that names the row."""
    num_workers: int | None = field(default=None, metadata=rules.POSITIVE)
    """Processes for functions that can hang (your own, math, format), beside the run's; null: one a CPU, 8 at most."""

    @property
    def weights(self) -> dict[str, float]:
        """The functions whose weighted sum is the reward."""
        return self.functions or {CUSTOM if self.custom_reward_function.path else self.name: 1.0}


@dataclass
class RewardModelFolder:
    """The folder of the reward model."""

    path: str | None = None
    """Hugging Face folder or hub id of a classifier with one label (...ForSequenceClassification, or
    ...ForTokenClassification, whose last token counts). Texts are encoded anew where its tokenizer or chat template is
    not the student's."""
    trust_remote_code: bool = False
    """Run model code that comes with the folder."""


@dataclass
class RewardModelConfig:
    """A model that scores answers, on the GPUs of the workers that train; it is not trained. See docs/rewards.md."""

    enable: bool = False
    """The reward is the model's score, in the place of reward.name; reward.functions adds functions to it."""
    model: RewardModelFolder = field(default_factory=RewardModelFolder)
    max_length: int | None = field(default=None, metadata=rules.POSITIVE)
    """Tokens of prompt and answer that it reads; what is longer loses its end, which is logged and counted
    (reward/model_truncated/mean). null: as many as the model has positions."""
    forward_max_token_len_per_gpu: int | None = field(default=None, metadata=rules.POSITIVE)
    """Tokens in one packed micro-batch, or a longer text alone; null takes
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu."""
