"""Configuration schema: a dataclass per section, a docstring per field, rules of values as field metadata.

The models' sections are in actor_rollout_ref.py, those of losses and rewards in learning.py. loading.py reads YAML
files and overrides into these classes and checks the rules between fields. Does not import torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from omegaconf import II, MISSING

from hybrid_gkd.config import metadata as rules
from hybrid_gkd.config.actor_rollout_ref import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    CriticModelConfig,
    ModelConfig,
)
from hybrid_gkd.config.learning import (
    ADV_ESTIMATORS,
    MODEL,
    REWARD_FUNCTIONS,
    AlgorithmConfig,
    DistillationConfig,
    RewardConfig,
    RewardModelConfig,
)
from hybrid_gkd.losses.table import KL_LOSSES, policy_loss, weighted_divergences

BATCHES_AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}
"""trainer.scheduler -> number of batches that generation is ahead of the update, the largest staleness."""


@dataclass
class DataConfig:
    """Prompts for training and validation."""

    train_files: Any = MISSING
    """One or a list of: files (.jsonl, .json, .csv, each also .gz or .zst; .parquet), patterns, folders of files or of
    `save_to_disk`, `folder:split`, hub data sets `org/name[:config][:split]`."""
    train_weights: list[float] | None = field(default=None, metadata=rules.FRACTIONS)
    """Fraction of the rows of each entry of train_files in an epoch, rotating over epochs; 1: all rows; null: 1 each.
    The same as train_files={answers.jsonl: 1, others.jsonl: 0.25}."""
    val_files: Any = None
    """Like train_files; null disables validation."""
    max_unpacked_gigabytes: float = field(default=4.0, metadata=rules.POSITIVE)
    """Limit of the text of a .gz or .zst file, GB; a small file may unpack to more than the memory. Lines of JSON and
    of CSV are read as a stream, so that only the columns that are used count."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    response_key: str | None = None
    """Column with given completions to learn from: a text, or a list of chat messages that begins and ends with the
    assistant's. With the same column as prompt_key: the messages after the last one of the user. The student completes
    rows and files without one. See docs/given_answers.md."""
    loss_mask: Literal["answer", "assistant", "all"] = "answer"
    """Trained tokens of rows with a given completion: the assistant's turns in the completion (answer), also those in
    the prompt (assistant), or all tokens (all)."""
    excluded_spans_key: str | None = None
    """Column with parts of given completions that are not trained on, a list of [start, end) in characters of the
    text."""
    teacher_prompt_key: str | None = None
    """Column with another prompt for the teacher, such as the student's with a hint, a reference solution or a system
    prompt: a text or chat messages. Rows without a value show the teacher the student's prompt. See docs/teacher.md."""
    max_teacher_prompt_length: int | None = field(default=None, metadata=rules.POSITIVE)
    """Maximum length of the teacher's prompts, tokens; null takes max_prompt_length. filter_overlong_prompts and
    truncation hold for them too."""
    reward_fn_key: str = "data_source"
    """Column with the data source of a row. The default column is optional."""
    max_prompt_length: int = field(default=1024, metadata=rules.POSITIVE)
    """Maximum length of a prompt, chat template included, tokens."""
    max_response_length: int = field(default=1024, metadata=rules.POSITIVE)
    """Maximum length of a generated response, tokens."""
    max_response_length_schedule: dict[Any, Any] = field(default_factory=dict, metadata=rules.LENGTH_SCHEDULE)
    """Step -> maximum response length in training from that step on, increasing up to max_response_length: {1: 512,
    100: 1024}; before the first entry it is max_response_length. {}: constant."""
    train_batch_size: int = field(default=128, metadata=rules.POSITIVE)
    """Prompts per training step, over all workers."""
    gen_batch_size: int | None = field(default=None, metadata=rules.POSITIVE)
    """Prompts of a generation batch with algorithm.filter_groups, of which train_batch_size are trained on; null takes
    train_batch_size."""
    shuffle: bool = True
    """Shuffle the prompts in every epoch; false keeps the order of the files."""
    seed: int = field(default=II("trainer.seed"), metadata=rules.SEED)
    """Seed of the shuffling and of the draws by distillation.on_policy_fraction; by default trainer.seed."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than max_prompt_length, and log their number, instead of applying truncation."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Treatment of a prompt longer than max_prompt_length: raise an error, or cut the named part."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the tokenizer's chat template, e.g. {enable_thinking: false}."""


@dataclass
class WandbConfig:
    """Settings of Weights & Biases."""

    entity: str | None = None
    """User or team; null takes the default of the login."""
    group: str | None = None
    """Group of the run; runs of a group, such as repetitions with other seeds, are shown together."""
    tags: list[str] = field(default_factory=list)
    """Labels for filtering runs."""
    notes: str | None = None
    """Description of the run."""
    workspace: bool = True
    """Create the workspace `hybrid_gkd`, the dashboard of docs/observing.md, in a project that has none of that name.
    An offline run does not; python -m hybrid_gkd.reporting.dashboard creates or updates it later."""
    log_report: bool = False
    """Log report.html as an artifact `report-<run id>` at the end of the run: about 1 MB, including the warnings of
    run.log."""


@dataclass
class TrainerConfig:
    """The run."""

    scheduler: Literal["sync", "one_step_off", "two_step_off"] = "sync"
    """Batches by which generation runs ahead of the update: none (sync), one (one_step_off) or two (two_step_off). The
    teacher scores in that time; responses are sampled from weights up to one or two steps old."""
    total_epochs: int = field(default=1, metadata=rules.POSITIVE)
    """Passes over the prompts. Prompts left over at the end of an epoch begin the next one; an incomplete last batch is
    left out and logged at the start. With algorithm.filter_groups the number of steps is that of these passes'
    generation batches, although a step may take several."""
    total_training_steps: int | None = field(default=None, metadata=rules.POSITIVE)
    """Training steps; null takes total_epochs. Overrides total_epochs if both are set."""
    project_name: str = field(default="hybrid_gkd", metadata=rules.FOLDER_NAME)
    """Project in wandb, and folder under default_local_dir."""
    experiment_name: str = field(default="gkd", metadata=rules.FOLDER_NAME)
    """Name of the run in wandb, and folder under the project."""
    logger: list[str] = field(default_factory=lambda: ["console", "wandb"], metadata=rules.TRACKERS)
    """Any of console, wandb, tensorboard, trackio, and module:name of a custom tracker. metrics.jsonl,
    generations.jsonl and run.log are always written; the name jsonl is accepted without effect."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    console: Literal["auto", "progress", "full", "quiet"] = "auto"
    """Console output. full: a line per step with time and all metrics by name; progress: a progress bar, or without a
    terminal a short line every few seconds; auto: progress on a terminal, full in a file; quiet: warnings, errors and
    the final table, as with --quiet."""
    nnodes: int = field(default=1, metadata=rules.POSITIVE)
    """Machines of the Ray cluster."""
    n_gpus_per_node: int = field(default=1, metadata=rules.POSITIVE)
    """Workers per machine, one GPU each (on the CPU: worker processes)."""
    save_freq: int = field(default=-1, metadata=rules.FREQUENCY)
    """Steps between checkpoints; -1: only at the end; 0: never."""
    test_freq: int = field(default=-1, metadata=rules.FREQUENCY)
    """Steps between validations; -1: only before and after training."""
    critic_warmup: int = field(default=0, metadata=rules.NOT_NEGATIVE)
    """Initial steps in which only the critic is updated."""
    warmup_steps_sft: int = field(default=0, metadata=rules.NOT_NEGATIVE)
    """Initial steps that train by cross-entropy on given completions only (data.response_key), at the rate of
    actor_rollout_ref.actor.optim_sft. Then actor.optim begins; unless it has its own warm-up, its rate rises over the
    first tenth of the remaining optimizer steps."""
    val_before_train: bool = True
    """Validate before the first training step."""
    val_only: bool = False
    """Validate the checkpoint or model that the run would start from, and end; data.train_files is not read."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto resumes from the newest checkpoint of this experiment; resume_path from resume_from_path; disable starts
    a new run."""
    resume_from_path: str | None = None
    """Checkpoint folder, `global_step_N`."""
    allow_changed_config: bool = False
    """Resume although a key of the learning signal (loss, rate, data, ...) has changed, or a model folder has moved;
    not with other batches, see docs/running.md. Another teacher: actor_rollout_ref.teacher.allow_teacher_change."""
    default_local_dir: str = "outputs"
    """Root of the run folders: <default_local_dir>/<project_name>/<experiment_name>."""
    max_actor_ckpt_to_keep: int | None = field(default=2, metadata=rules.POSITIVE)
    """Number of newest checkpoints to keep; null keeps all."""
    best_metric: str | None = None
    """Also keep the best checkpoint by this validation metric, e.g. val/accuracy (maximum) or val/forward_kl (minimum).
    A new best one is saved regardless of save_freq."""
    balance_batch: bool = True
    """Balance the work of the workers, with a higher cost per token for long sequences; false: contiguous slices."""
    log_val_generations: int = field(default=8, metadata=rules.NOT_NEGATIVE)
    """Number of held-out prompts, evenly from the data sources, whose completions are logged with each validation."""
    grace_period: float = field(default=60.0, metadata=rules.NOT_NEGATIVE)
    """Seconds to finish and save the current step after Ctrl-C, SIGTERM or a closed terminal; 0 or a second signal ends
    the run at once. It must be enough for a step and a checkpoint, possibly after one that is being written."""
    max_restarts: int = field(default=0, metadata=rules.NOT_NEGATIVE)
    """Largest number of restarts after faults, each from the newest checkpoint or snapshot: the run replaces lost
    workers itself; --supervise (where 0 takes 20) starts it again after other faults. 0: none."""
    snapshot_freq: int | None = field(default=None, metadata=rules.NOT_NEGATIVE)
    """Steps between snapshots: checkpoints without exports, written in the background, of which the newest is kept to
    restart from. null: with max_restarts as often as they cost at most 2 % of the time, else never; 0: never."""
    snapshot_dir: str | None = None
    """Folder for snapshots that all workers share, such as /dev/shm with one machine; null: in the run folder."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the workers; auto = cuda if a GPU is visible to the process that starts the run."""
    profile_steps: list[int] = field(default_factory=list, metadata=rules.STEPS)
    """Steps in which every worker runs torch's profiler: profile_step_N_worker_M.json.gz beside trace.json."""
    seed: int = field(default=0, metadata=rules.SEED)
    """Seed of the run: of new weights (LoRA adapters, a critic's head) and random layers, and the default of data.seed
    and actor_rollout_ref.rollout.seed."""


@dataclass
class RolloutPoolConfig:
    """The rollout engine's separate pool of workers, with actor_rollout_ref.hybrid_engine=false."""

    nnodes: int = field(default=1, metadata=rules.POSITIVE)
    """Machines of the pool."""
    n_gpus_per_node: int | None = field(default=None, metadata=rules.POSITIVE)
    """Workers per machine, one GPU each (on the CPU: worker processes), in addition to trainer.n_gpus_per_node."""


@dataclass
class RayInitConfig:
    """Connection to Ray."""

    address: str | None = field(default=None, metadata=rules.RAY_ADDRESS)
    """Address of a running cluster; null starts one on this machine for the duration of the run."""
    num_cpus: int | None = field(default=None, metadata=rules.POSITIVE)
    """CPUs of a local cluster; null takes all."""
    placement_timeout: float = field(default=30.0, metadata=rules.POSITIVE)
    """Timeout for the cluster to place the workers, seconds; increase it for autoscaling or busy clusters."""


DEFAULT_MINI_BATCHES = 4
"""Mini-batches of a rollout where `ppo_mini_batch_size` is null."""


def prompts_per_update(prompts: int, section: ActorConfig | CriticConfig) -> int:
    """Return the prompts per optimizer step of a model, for rollouts of `prompts` prompts."""
    return section.ppo_mini_batch_size or -(-prompts // DEFAULT_MINI_BATCHES)


def updates_per_step(prompts: int, section: ActorConfig | CriticConfig) -> int:
    """Return the optimizer steps of a model in a training step of `prompts` prompts."""
    return -(-prompts // prompts_per_update(prompts, section)) * (section.ppo_epochs or 1)


@dataclass
class Config:
    """The whole configuration."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutPoolConfig = field(default_factory=RolloutPoolConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    @property
    def on_policy_fraction(self) -> float:
        """Return the fraction of the tasks with a given completion that the student completes instead."""
        given = self.distillation.on_policy_fraction
        return given if given is not None else 0.0 if self.data.response_key is not None else 1.0

    @property
    def sft_coef(self) -> float:
        """Return the factor of the cross-entropy of given completions."""
        given = self.distillation.sft_coef
        return given if given is not None else 0.0 if self.distillation.enabled else 1.0

    @property
    def full_determinism(self) -> bool:
        """Return whether two runs of the same seeds must have the same metrics."""
        sections = (self.actor_rollout_ref.actor.fsdp_config, self.critic.fsdp_config)
        return any(section.full_determinism for section in sections)

    @property
    def is_sft(self) -> bool:
        """Return whether training uses only given completions, without teacher and rewards."""
        return not (self.distillation.enabled or self.on_policy_fraction)

    @property
    def trains_on_rewards(self) -> bool:
        """Return whether the actor is trained on rewards, with or without a teacher."""
        return not self.is_sft and (self.distillation.use_task_rewards or not self.distillation.enabled)

    @property
    def scores_rollouts(self) -> bool:
        """Return whether rewards of rollouts are computed: to train on, or for distillation.teacher_prompt_fn."""
        loss = self.distillation
        return self.trains_on_rewards or (loss.enabled and loss.teacher_prompt_fn is not None and self.has_reward)

    @property
    def has_advantages(self) -> bool:
        """Return whether tokens have advantages, from rewards or from the teacher's log-ratios."""
        return self.trains_on_rewards or self.distillation.as_reward

    @property
    def has_sampled_loss(self) -> bool:
        """Return whether a term of the actor's loss depends on the sampled token: policy losses, not divergences."""
        loss, actor = self.distillation, self.actor_rollout_ref.actor
        estimated = actor.use_kl_loss and KL_LOSSES[actor.kl_loss_type].signal == "sampled"
        divergences = weighted_divergences(loss.loss_mode, loss.mixed_weights, loss.loss_fn)
        return self.has_advantages or estimated or any(row.signal == "sampled" for _, row in divergences)

    @property
    def needs_rollout_logprobs(self) -> bool:
        """Return whether the rollout engine returns log-probabilities, for corrections or custom token weights."""
        row = self.distillation.weighting
        return self.algorithm.compares_logprobs or (row is not None and row.needs == "teacher")

    @property
    def distils_alone(self) -> bool:
        """Return whether distillation is the only loss term, so that tokens with weight 0 need not be computed."""
        loss, actor = self.distillation, self.actor_rollout_ref.actor
        of_sequences = loss.use_policy_gradient and policy_loss(actor.policy_loss.loss_mode).of_sequences
        others = self.has_advantages or self.sft_coef or actor.use_kl_loss or actor.entropy_coeff or of_sequences
        return loss.enabled and not others

    @property
    def reward_weights(self) -> dict[str, float]:
        """Return the weights of the rewards by name; with a reward model and no `reward.functions`, of the reward model
        only."""
        alone = self.reward_model.enable and not self.reward.functions
        return {MODEL: 1.0} if alone else self.reward.weights

    @property
    def has_reward(self) -> bool:
        """Return whether there is a reward; the default one needs the column with the right answers."""
        needs_answer = any(REWARD_FUNCTIONS.get(name, False) for name in self.reward_weights)
        return self.reward.answer_key is not None or not needs_answer

    @property
    def has_reward_functions(self) -> bool:
        """Return whether reward functions are used, with or without a reward model."""
        return self.has_reward and self.reward_weights.keys() != {MODEL}

    @property
    def uses_reward_model(self) -> bool:
        """Return whether a reward model scores responses in training or validation."""
        return self.reward_model.enable and (self.scores_rollouts or bool(self.data.val_files))

    @property
    def world_size(self) -> int:
        """Return the number of training workers."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def rollout_world_size(self) -> int:
        """Return the number of generating workers; with a hybrid engine these are the training workers."""
        return self.rollout.nnodes * (self.rollout.n_gpus_per_node or 0) or self.world_size

    @property
    def workers_per_node(self) -> int:
        """Return the number of workers on one machine, over all pools."""
        return self.trainer.n_gpus_per_node + (self.rollout.n_gpus_per_node or 0)

    @property
    def shard_size(self) -> int:
        """Return the number of workers that share one copy of the student's weights."""
        size = self.actor_rollout_ref.actor.fsdp_config.fsdp_size
        return self.world_size if size == -1 else size

    @property
    def uses_critic(self) -> bool:
        """Return whether advantages need a critic's values."""
        needed = ADV_ESTIMATORS.get(self.algorithm.adv_estimator) == "critic"
        return self.has_advantages and needed and not self.trainer.val_only

    @property
    def uses_reference(self) -> bool:
        """Return whether a KL to a reference policy is part of the loss or the rewards."""
        needed = self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward
        return needed and not self.trainer.val_only

    @property
    def teaches_itself(self) -> bool:
        """Return whether the teacher has weights of the student."""
        return self.distillation.enabled and self.actor_rollout_ref.teacher.source != "model"

    @property
    def has_moving_average(self) -> bool:
        """Return whether the student's moving average is the teacher."""
        return self.teaches_itself and self.actor_rollout_ref.teacher.source == "ema"

    @property
    def has_reference_model(self) -> bool:
        """Return whether the workers have a frozen second model, as reference policy or teacher; with LoRA it can be
        the student without adapters."""
        arr = self.actor_rollout_ref
        needed = self.uses_reference or (self.teaches_itself and arr.teacher.source == "initial")
        return needed and not (arr.model.has_lora and arr.ref.model.path is None)

    @property
    def ref_topk(self) -> int:
        """Return the number of candidates per position of the reference policy; 0: only the sampled token."""
        arr = self.actor_rollout_ref
        return arr.ref.topk if arr.actor.use_kl_loss and arr.actor.kl_loss_type == "full" else 0

    @property
    def ref_model(self) -> ModelConfig:
        """Return the model section of the reference policy."""
        student, own = self.actor_rollout_ref.model, self.actor_rollout_ref.ref.model.path
        found = ModelConfig(path=own or student.path, trust_remote_code=student.trust_remote_code)
        found.override_config = student.override_config if own is None else {}
        return found

    @property
    def critic_shard_size(self) -> int:
        """Return the number of workers that share one copy of the critic's weights."""
        size = self.critic.fsdp_config.fsdp_size
        return self.world_size if size == -1 else size

    @property
    def resolved_critic(self) -> CriticConfig:
        """Return the section critic with nulls replaced by the values of student and actor."""
        own, student, actor = self.critic, self.actor_rollout_ref.model, self.actor_rollout_ref.actor
        model = _filled(own.model, student, without=() if own.model.path is None else ("override_config",))
        return dataclasses.replace(_filled(own, actor), model=model)

    @property
    def critic_model(self) -> ModelConfig:
        """Return the model section that the critic is initialised from."""
        own = self.resolved_critic.model
        found = {name: value for name, value in vars(own).items() if value is not None}
        return ModelConfig(**found)

    @property
    def max_sequence_length(self) -> int:
        """Return the length of the longest possible prompt with its longest response, tokens."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def teacher_prompt_limit(self) -> int:
        """Return the length of the longest prompt that the teacher reads, tokens."""
        return max(self.data.max_teacher_prompt_length or 0, self.data.max_prompt_length)

    @property
    def max_reading_length(self) -> int:
        """Return the length of the longest sequence that the teacher scores, tokens."""
        return self.teacher_prompt_limit + self.data.max_response_length

    @property
    def max_packed_length(self) -> int:
        """Return the length of the longest sequence that the training workers read, tokens."""
        return self.max_reading_length if self.teaches_itself else self.max_sequence_length

    @property
    def engine_length(self) -> int:
        """Return the length of the longest sequence of the rollout engine, tokens."""
        return self.actor_rollout_ref.rollout.max_model_len or self.max_sequence_length

    @property
    def teacher_length(self) -> int:
        """Return the length of the longest sequence of a local teacher, which generates one token to score."""
        more = self.data.max_response_length if self.distillation.cross_tokenizer != "refuse" else 0
        return self.actor_rollout_ref.teacher.max_model_len or self.max_reading_length + more + 1

    @property
    def mini_batch_size(self) -> int:
        """Return the number of prompts per optimizer step."""
        return prompts_per_update(self.data.train_batch_size, self.actor_rollout_ref.actor)

    @property
    def sft_updates(self) -> int:
        """Return the optimizer steps of the first `trainer.warmup_steps_sft` steps."""
        actor = self.actor_rollout_ref.actor
        return self.trainer.warmup_steps_sft * updates_per_step(self.data.train_batch_size, actor)

    def saves_while_training(self, steps: int | None) -> bool:
        """Return whether checkpoints are written during a run of `steps` steps (None: unknown), not only at its end."""
        trainer = self.trainer
        frequencies = [trainer.save_freq]
        if trainer.best_metric is not None:
            frequencies.append(trainer.test_freq)
        saves = any(every > 0 and (steps is None or every < steps) for every in frequencies)
        return (saves and not trainer.val_only) or self.takes_snapshots

    @property
    def takes_snapshots(self) -> bool:
        """Return whether `trainer.snapshot_freq` asks for snapshots."""
        trainer = self.trainer
        wanted = trainer.max_restarts > 0 if trainer.snapshot_freq is None else trainer.snapshot_freq > 0
        return wanted and not trainer.val_only

    @property
    def experiment_dir(self) -> Path:
        """Return the folder of the checkpoints."""
        trainer = self.trainer
        return Path(trainer.default_local_dir).expanduser().absolute() / trainer.project_name / trainer.experiment_name

    @property
    def run_dir(self) -> Path:
        """Return the folder of this run's files; `trainer.val_only` has a subfolder, beside those of a training run."""
        return self.experiment_dir / "validation" if self.trainer.val_only else self.experiment_dir


Section = TypeVar("Section", CriticConfig, CriticModelConfig)


def _filled(section: Section, other: Any, without: tuple[str, ...] = ()) -> Section:
    """Return a section with nulls replaced by the values of the same fields of another section."""
    names = [name for name, value in vars(section).items() if value is None and name not in without]
    return dataclasses.replace(section, **{name: getattr(other, name) for name in names})
