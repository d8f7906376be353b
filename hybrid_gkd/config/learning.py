"""The sections distillation, algorithm, reward and reward_model: the learning signal. See schema.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid_gkd.config import metadata as rules
from hybrid_gkd.config.actor_rollout_ref import NamedTeacherConfig
from hybrid_gkd.losses.table import DIVERGENCES, TOKEN_WEIGHTS, UNIFORM, TokenWeights, token_weights


@dataclass
class DistillationConfig:
    """The distillation loss."""

    enabled: bool = True
    """false trains without a teacher: by PPO on the reward, or by cross-entropy on given completions (SFT)."""
    teacher_models: dict[str, NamedTeacherConfig] = field(default_factory=dict)
    """Several teachers by a name of your own: each has a key and the fields of actor_rollout_ref.teacher, and scores
    the rows that have its key. actor_rollout_ref.teacher, if set too, scores the rest. See docs/teacher.md."""
    teacher_key: str = "data_source"
    """Column with the key of each row's teacher, with several teachers."""
    ensemble: Literal["none", "mixture", "sum"] = "none"
    """Teachers of teacher_models with the same key: not allowed (none), or all score a row, and the student learns the
    weighted mean of their probabilities (mixture), or the losses of all teachers are added, each with its weight
    (sum)."""
    teacher_sharing: Literal["memory", "turns"] = "memory"
    """Local teachers on one GPU: divide its memory (memory), or take turns with all of it (turns): the models of the
    others are on the host, and teachers score whole rollouts one after the other."""
    on_policy_fraction: float | None = field(default=None, metadata=rules.FRACTION)
    """Fraction of the tasks with a given completion (data.response_key) that the student completes itself (lambda in
    arXiv 2306.13649), chosen anew for each batch; null: none of them."""
    sft_coef: float | None = field(default=None, metadata=rules.NOT_NEGATIVE)
    """Factor of the cross-entropy of given completions, which is added to the losses of teacher and rewards; null: 0
    with a teacher, which scores given completions too, and 1 without."""
    loss_mode: str = field(default="forward_kl", metadata=rules.names(*DIVERGENCES, "mixed"))
    """Divergence between teacher and student, see docs/losses.md: on the teacher's candidates (forward_kl,
    reverse_kl, jsd), a weighted sum (mixed), or an estimate from the sampled token (k1, k2, k3)."""
    loss_fn: str | None = field(default=None, metadata=rules.IMPORT_PATH)
    """Your own divergence in place of loss_mode: module:name or file.py:name of a function like forward_kl in
    hybrid_gkd/losses/divergence.py."""
    beta: float = field(default=0.5, metadata=rules.FRACTION)
    """Weight of the teacher in jsd's mixture; 0 is forward_kl and 1 is reverse_kl."""
    mixed_weights: dict[str, float] = field(default_factory=dict)
    """Weights of loss_mode=mixed, e.g. {forward_kl: 0.5, reverse_kl: 0.5}; all modes except k1 are allowed."""
    cross_tokenizer: Literal["refuse", "map", "spans"] = "refuse"
    """A teacher with another tokenizer: not allowed (refuse); its tokens and the student's are aligned by bytes, and
    the student's tokens that are one of the teacher's are learned from (map), or all of them (spans). See
    docs/teacher.md."""
    teacher_prompt_fn: str | None = field(default=None, metadata=rules.IMPORT_PATH)
    """Build the teacher's prompt after the completions, from feedback or a successful completion: module:name or
    file.py:name of function(task, sample, group), which returns a text, messages, or None for no teacher. See
    docs/teacher.md."""
    use_policy_gradient: bool = False
    """Minimise the mean of k1, k2 or k3 over the student's samples, by PPO's clipped loss: the negative advantage of
    the sampled token is the value plus its slope in the student's log-probability. false: the value is the loss."""
    topk: int = field(default=64, metadata=rules.POSITIVE)
    """Candidates per position, see candidates."""
    candidates: Literal["teacher", "student", "union"] = "teacher"
    """Tokens on which teacher and student are compared at each position: the topk that the teacher finds most likely
    (teacher), those that the student does (student), or those of the student and the topk most likely others of the
    teacher (union). Those of the student cost it a forward pass before the teacher can score. See docs/losses.md."""
    tail: Literal["bucket", "sampled", "none", "renormalise"] = "bucket"
    """The vocabulary outside the top-k: one bucket; that and, from sampled tokens within it, an estimate of the rest of
    the gradient (sampled); left out; or removed from both distributions. See docs/losses.md."""
    temperature: float = field(default=1.0, metadata=rules.TEMPERATURE)
    """Temperature at which both distributions are compared."""
    distillation_loss_coef: float = field(default=1.0, metadata=rules.POSITIVE)
    """Factor of the loss, or of the reward with as_reward."""
    distillation_loss_coef_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the factor: constant, or falling from distillation_loss_coef at the first step to 0 after the end."""
    use_task_rewards: bool = False
    """Add PPO's policy loss on the task reward."""
    as_reward: bool = False
    """Use log p - log q of each sampled token as a reward of that token, added to the task reward if there is one;
    algorithm.adv_estimator computes advantages from it, and no divergence is minimised."""
    loss_max_clamp: float | None = field(default=None, metadata=rules.POSITIVE)
    """Limit of a token's divergence, plus or minus, nats; a token beyond it has no gradient. With use_policy_gradient
    the advantage is limited. actor/distillation/clamp_share is the fraction of such tokens."""
    token_weights: str = field(default=UNIFORM, metadata=rules.names(UNIFORM, *TOKEN_WEIGHTS, or_own=True))
    """Weights of the tokens in the loss, see docs/losses.md: all the same (uniform), or a selection: the beginning of
    each completion (position), where the student's entropy is highest (student_entropy), where the student is certain
    of a token that the teacher finds unlikely (confident_wrong). Or module:name or file.py:name of a function."""
    token_weights_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of token_weights by name: the fraction of each completion's tokens that is selected, by default
    {fraction: 0.3} with position, 0.5 with student_entropy, 0.1 with confident_wrong; anything for a function of your
    own."""

    @property
    def given_topk(self) -> int:
        """Return the number of candidates per position where those of the student are among them; 0: nowhere."""
        return {"teacher": 0, "student": 1, "union": 2}[self.candidates] * self.topk

    @property
    def weighting(self) -> TokenWeights | None:
        """Return the row of token_weights with its arguments; None if all tokens have the same weight."""
        return token_weights(self.token_weights, self.token_weights_kwargs) if self.enabled else None


ADV_ESTIMATORS = {
    "gae": "critic", "grpo": "group", "rloo": "group", "reinforce_plus_plus": "",
    "reinforce_plus_plus_baseline": "group", "remax": "greedy completion", "opo": "group",
}
"""algorithm.adv_estimator -> baseline of a completion: a critic's values, the prompt's other completions (group), or
the greedy completion. The functions are in hybrid_gkd/ppo/advantages.py."""


REJECTION_RULES = (
    *(f"token_k{k}" for k in (1, 2, 3)), *(f"seq_sum_k{k}" for k in (1, 2, 3)), *(f"seq_mean_k{k}" for k in (1, 2, 3)),
    "seq_max_k2", "seq_max_k3",
)
"""Rules of algorithm.rollout_rs: k1, k2 or k3 of a token, or their sum, mean or maximum over its completion."""


def rejection_bounds(names: str, limits: Any) -> dict[str, tuple[float, float]]:
    """Parse rollout_rs and rollout_rs_threshold: rule -> smallest and largest value that is kept, nats.

    Raises ValueError with the broken rule.
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
    """The coefficient of the KL penalty in the rewards."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: always kl_coef; adaptive: multiplied after every step by 1 + e completions / horizon, where
    e = KL / target_kl - 1, clipped to -0.2 and 0.2 (arXiv 1909.08593). A resumed run continues with its value."""
    kl_coef: float = field(default=0.001, metadata=rules.NOT_NEGATIVE)
    """The coefficient; with adaptive, the initial one."""
    horizon: int = field(default=10000, metadata=rules.POSITIVE)
    """Completions over which adaptive changes the coefficient by a factor of about 1 + e; a larger one is slower."""
    target_kl: float = field(default=0.1, metadata=rules.POSITIVE)
    """Target of adaptive, nats per token."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): replace uninformative groups, see docs/ppo.md."""

    enable: bool = False
    """Leave out prompts whose completions all have the same metric, and refill the batch with further prompts."""
    metric: str = field(default="seq_reward", metadata=rules.names("acc", "score", "seq_reward"))
    """Metric of a completion: seq_reward is its reward, from which advantages are computed; score is the reward without
    the overlong penalty; acc is the number of that name returned by a custom reward function, else the score."""
    max_num_gen_batches: int = field(default=10, metadata=rules.POSITIVE)
    """Maximum number of generation batches per training step; the run ends with an error if they have too few
    informative groups."""


@dataclass
class AlgorithmConfig:
    """Advantages and importance weights."""

    adv_estimator: str = field(default="grpo", metadata=rules.names(*ADV_ESTIMATORS, or_own=True))
    """Advantage estimator, see docs/ppo.md: gae (relative to a critic's values), grpo, rloo, opo,
    reinforce_plus_plus_baseline (relative to the prompt's other completions), reinforce_plus_plus (relative to the
    batch), remax (relative to the greedy completion), or module:name or file.py:name of a function like grpo of
    hybrid_gkd/ppo/advantages.py."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the standard deviation of the group in grpo; false as in Dr. GRPO."""
    gamma: float = field(default=1.0, metadata=rules.FRACTION)
    """Discount factor of later rewards, per token (reinforce_plus_plus, gae, custom estimators)."""
    lam: float = field(default=1.0, metadata=rules.FRACTION)
    """Decay of later temporal differences, per token (gae, custom estimators)."""
    use_kl_in_reward: bool = False
    """Subtract the KL from the student to the reference policy (actor_rollout_ref.ref) from the rewards of each token
    before advantages are computed. Costs two forward passes, one of the reference."""
    kl_penalty: str = field(default="k1", metadata=rules.names("k1", "abs", "k2", "k3"))
    """Estimator of that KL from the sampled token's log-ratio l: k1 is l (verl: kl), abs is |l|, k2 is l^2 / 2 (verl:
    mse), k3 is exp(-l) - 1 + l (verl: low_var_kl). Only k1 has the gradient of the KL when used as a reward.
    """
    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    rollout_is_threshold: float | None = None
    """Truncation of importance weights that correct for the difference between the student and the rollout policy
    (older weights, the engine's arithmetic): every token's loss is multiplied by min(weight, threshold), threshold >=
    1; null disables them. Costs a forward pass."""
    rollout_is: Literal["prefix", "token", "sequence"] = "prefix"
    """Weight of a token: pi_current / pi_rollout of the completion up to it (prefix), of the token alone (token), or
    of the whole completion (sequence). prefix excludes the token's own ratio for losses over the whole distribution,
    such as divergences; token is for losses of the sampled token."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Exclude tokens or completions that differ too much from the loss, by rules such as token_k1 or seq_mean_k3,
    separated by commas, see docs/losses.md. Costs the same forward pass."""
    rollout_rs_threshold: Any = None
    """Limits of rollout_rs: one number for all rules, or one per rule separated by commas. For k1 bounds of
    the ratio of rollout policy and current student, lower_upper such as 0.5_2.0; a single number u is 1/u_u. For k2 and
    k3 the largest value, nats."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)

    @property
    def adapts_kl_coef(self) -> bool:
        """Return whether the KL coefficient of the rewards changes and is saved in checkpoints."""
        return self.use_kl_in_reward and self.kl_ctrl.type == "adaptive"

    @property
    def compares_logprobs(self) -> bool:
        """Return whether the log-probabilities of engine and student are compared."""
        return self.rollout_is_threshold is not None or self.rollout_rs is not None


REWARD_FUNCTIONS = {
    "exact_match": True, "gsm8k": True, "math": True, "by_data_source": True, "format": False, "length": False,
}  # fmt: skip
"""Built-in rewards -> whether they need the right answer."""
CUSTOM, MODEL = "custom", "model"
"""Names in reward.functions of the custom function and of the reward model."""
REWARD_MODEL_PATH = "reward_model.model.path"
"""Configuration key, for messages."""


@dataclass
class CustomRewardFunction:
    """A custom reward function; docs/rewards.md describes its arguments."""

    path: str | None = None
    """Python file that defines the function."""
    name: str = "compute_score"
    """Name of the function."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function."""


@dataclass
class OverlongBufferConfig:
    """Penalty on completions near max_response_length, eq. 13 of arXiv 2503.14476 (DAPO); training only."""

    enable: bool = False
    """Add the penalty to the reward: 0 up to `len` tokens before data.max_response_length, then falling linearly to
    -penalty_factor."""
    len: int = field(default=512, metadata=rules.POSITIVE)
    """Length of the penalized range, tokens."""
    penalty_factor: float = field(default=1.0, metadata=rules.POSITIVE)
    """Penalty of a completion of data.max_response_length tokens."""


@dataclass
class RewardConfig:
    """Reward of a completion, for PPO and for validation; see docs/rewards.md."""

    name: str = field(default="exact_match", metadata=rules.names(*REWARD_FUNCTIONS))
    """exact_match compares the stripped completion, gsm8k the last number, math the last expression (with math-verify);
    format searches for `reward.format`; length is minus the used fraction of max_response_length; by_data_source
    selects gsm8k or math by the row's data source."""
    functions: dict[str, float] = field(default_factory=dict)
    """Weighted sum of several rewards in place of name: {gsm8k: 1.0, format: 0.2}; the custom function is called
    custom, and the reward model, which must be listed if it is enabled, model."""
    answer_key: str | None = None
    """Column with the right answer (dotted for nested ones, e.g. reward_model.ground_truth)."""
    strict: bool = False
    r"""Require a marked final answer in gsm8k, math and by_data_source, as in verl: after ####, in \\boxed{}, and for
    math_dapo and aime* in a line `Answer: ...`."""
    format: str | None = None
    """Regular expression that format searches in the stripped completion; a dot also matches newlines."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    custom_reward_function: CustomRewardFunction = field(default_factory=CustomRewardFunction)
    timeout: float = field(default=60.0, metadata=rules.POSITIVE | rules.MAY_BE_INFINITE)
    """Seconds that a function may take for one completion, or a batch function for all; .inf: no limit. Its process is
    then killed and replaced."""
    score_on_error: float | None = None
    """Reward of a completion for which the custom function raises, times out, or returns no number; null: the run ends
    with an error that names the row."""
    num_workers: int | None = field(default=None, metadata=rules.POSITIVE)
    """Processes for functions that can hang (custom, math, by_data_source, format); null: one per CPU, at most 8."""

    @property
    def weights(self) -> dict[str, float]:
        """Return the weights of the rewards by name."""
        return self.functions or {CUSTOM if self.custom_reward_function.path else self.name: 1.0}


@dataclass
class RewardModelFolder:
    """The folder of the reward model."""

    path: str | None = None
    """Hugging Face folder or hub id of a classifier with one label (...ForSequenceClassification, or
    ...ForTokenClassification, whose last token counts). Texts are tokenized again if its tokenizer or chat template
    differs from the student's."""
    trust_remote_code: bool = False
    """Run model code from the folder."""


@dataclass
class RewardModelConfig:
    """A frozen model that scores completions, on the GPUs of the training workers. See docs/rewards.md."""

    enable: bool = False
    """Use the model's score as reward in place of reward.name; reward.functions adds functions to it."""
    model: RewardModelFolder = field(default_factory=RewardModelFolder)
    max_length: int | None = field(default=None, metadata=rules.POSITIVE)
    """Maximum number of tokens of prompt and completion; longer texts are truncated at the end, which is logged and
    counted (reward/model_truncated/mean). null: as many as the model has positions."""
    forward_max_token_len_per_gpu: int | None = field(default=None, metadata=rules.POSITIVE)
    """Maximum number of tokens in one packed micro-batch; a longer text is a micro-batch of its own. null takes
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu."""
