"""Configuration: one dataclass per section, a docstring per field, the rule of a value as field metadata.

The sections of the models are in models.py, those of losses and rewards in learning.py. loading.py reads YAML and
overrides into these and checks rules between fields. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from omegaconf import MISSING

from hybrid_gkd.config import metadata as rules
from hybrid_gkd.config.learning import (
    ADV_ESTIMATORS,
    MODEL,
    REWARD_FUNCTIONS,
    AlgorithmConfig,
    DistillationConfig,
    RewardConfig,
    RewardModelConfig,
)
from hybrid_gkd.config.models import ActorConfig, ActorRolloutRefConfig, CriticConfig, CriticModelConfig, ModelConfig
from hybrid_gkd.losses.table import KL_LOSSES, policy_loss, weighted_divergences

BATCHES_AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}
"""trainer.scheduler -> how many batches generation is ahead of the update, and so the largest staleness."""


@dataclass
class DataConfig:
    """Prompts for training and validation."""

    train_files: Any = MISSING
    """One or a list of: files (.jsonl, .json, .csv, each also .gz or .zst; .parquet), patterns, folders of files or of
    `save_to_disk`, `folder:split`, hub data sets `org/name[:config][:split]`."""
    train_weights: list[float] | None = field(default=None, metadata=rules.SHARES)
    """The share of the rows of each entry of train_files that an epoch takes, in turns: 1 takes all; null: 1 each. The
    same as train_files={answers.jsonl: 1, others.jsonl: 0.25}."""
    val_files: Any = None
    """Like train_files; null switches validation off."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    response_key: str | None = None
    """Column with answers that are there to be learned: a text, or a list of chat messages that begins and ends with
    the assistant's. The same as prompt_key: a chat's messages behind the last of its user. Rows and files without one
    are answered by the student. See docs/given_answers.md."""
    loss_mask: Literal["answer", "assistant", "all"] = "answer"
    """The tokens that are trained on where an answer is given: those of the assistant's turns in the answer (answer),
    of its turns in the prompt as well (assistant), or all."""
    excluded_spans_key: str | None = None
    """Column with parts of given answers that are not trained on, a list of [start, end) in characters of the text."""
    reward_fn_key: str = "data_source"
    """Column with the name of the data set that a row is from. Rows may do without the default one."""
    max_prompt_length: int = field(default=1024, metadata=rules.POSITIVE)
    """Tokens, chat template included."""
    max_response_length: int = field(default=1024, metadata=rules.POSITIVE)
    """Tokens that the student may generate."""
    max_response_length_schedule: dict[int, int] = field(default_factory=dict)
    """Step -> tokens that the student may generate in training from that step on, a limit that grows up to
    max_response_length: {1: 512, 100: 1024}; before the first step it is max_response_length. {}: always that."""
    train_batch_size: int = field(default=128, metadata=rules.POSITIVE)
    """Prompts per training step, over all workers."""
    gen_batch_size: int | None = field(default=None, metadata=rules.POSITIVE)
    """Prompts that are answered together with algorithm.filter_groups, which trains on train_batch_size of them; null
    takes train_batch_size."""
    shuffle: bool = True
    """A new order every epoch; false keeps the order of the files."""
    seed: int = field(default=0, metadata=rules.SEED)
    """Seed of the order."""
    filter_overlong_prompts: bool = False
    """Leave out prompts above max_prompt_length (their number is logged) instead of applying truncation."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """For a prompt above max_prompt_length: refuse the data, or cut the named part."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, e.g. {enable_thinking: false}."""


@dataclass
class WandbConfig:
    """How a run appears in Weights & Biases."""

    entity: str | None = None
    """User or team; null takes the login's default."""
    group: str | None = None
    """Runs of one group are shown together, as repetitions with other seeds."""
    tags: list[str] = field(default_factory=list)
    """Labels to filter runs by."""
    notes: str | None = None
    """A description of the run."""
    workspace: bool = True
    """Make the workspace `hybrid_gkd`, the dashboard of docs/dashboards.md, in a project that has none of that name.
    An offline run makes none; python -m hybrid_gkd.reporting.dashboard makes or updates it later."""
    log_report: bool = False
    """Log report.html as an artifact `report-<run id>` when the run ends: about 1 MB, with the warnings of run.log."""


@dataclass
class TrainerConfig:
    """The run."""

    scheduler: Literal["sync", "one_step_off", "two_step_off"] = "sync"
    """How far generation runs ahead of the update: sync = not at all; one_step_off, two_step_off = one or two batches,
    so that the teacher has that long to score; responses then come from weights up to one or two steps old."""
    total_epochs: int = field(default=1, metadata=rules.POSITIVE)
    """Passes over the prompts. What is left over at the end of one begins the next; only what fills no batch at the
    end of the last is left out, and said at the start. With algorithm.filter_groups as many steps as these passes have
    generation batches; a step may take several."""
    total_training_steps: int | None = field(default=None, metadata=rules.POSITIVE)
    """Steps; null takes total_epochs. Wins over total_epochs where both are given."""
    project_name: str = field(default="hybrid_gkd", metadata=rules.FOLDER_NAME)
    """Project in wandb, folder under default_local_dir."""
    experiment_name: str = field(default="gkd", metadata=rules.FOLDER_NAME)
    """Run name in wandb, folder under the project."""
    logger: list[str] = field(default_factory=lambda: ["console", "wandb"], metadata=rules.TRACKERS)
    """Any of console, wandb, tensorboard, trackio, and module:name of your own. metrics.jsonl, generations.jsonl and
    run.log are parts of every run; the name jsonl is taken and changes nothing."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    console: Literal["auto", "progress", "full", "quiet"] = "auto"
    """How the console shows a run. full: a line for each step, with the time and all metrics by name; progress: a bar,
    or without a terminal a short line every few seconds; auto: progress on a terminal, full in a file; quiet: warnings,
    errors and the final table, as with --quiet."""
    nnodes: int = field(default=1, metadata=rules.POSITIVE)
    """Machines of the Ray cluster."""
    n_gpus_per_node: int = field(default=1, metadata=rules.POSITIVE)
    """Workers per machine, one GPU each (on the CPU: worker processes)."""
    save_freq: int = field(default=-1, metadata=rules.FREQUENCY)
    """Steps between checkpoints; -1 saves only at the end, 0 never."""
    test_freq: int = field(default=-1, metadata=rules.FREQUENCY)
    """Steps between validations; -1 validates only before and after training."""
    critic_warmup: int = field(default=0, metadata=rules.NOT_NEGATIVE)
    """Steps at the beginning in which the critic alone is updated."""
    warmup_steps_sft: int = field(default=0, metadata=rules.NOT_NEGATIVE)
    """Steps at the beginning that train by cross-entropy on given answers alone (data.response_key), at the rate of
    actor_rollout_ref.actor.optim_sft. Behind them actor.optim begins; unless that has a warm-up of its own, its rate
    rises over the first tenth of the optimizer steps that are left."""
    val_before_train: bool = True
    """Validate the untrained student first."""
    val_only: bool = False
    """Validate what the run would start from, a checkpoint or the model, and end; data.train_files is not read."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto continues from the newest checkpoint of this experiment; resume_path from resume_from_path."""
    resume_from_path: str | None = None
    """A `global_step_N` folder."""
    allow_changed_config: bool = False
    """Continue although a key that decides what is learned (loss, rate, teacher, data, ...) is another than before, or
    a model has moved to another folder."""
    default_local_dir: str = "outputs"
    """Where run folders go: <default_local_dir>/<project_name>/<experiment_name>."""
    max_actor_ckpt_to_keep: int | None = field(default=2, metadata=rules.POSITIVE)
    """The newest ones stay, older ones are removed; null keeps all."""
    best_metric: str | None = None
    """Also keep the checkpoint that is best by this metric of the validations, e.g. val/accuracy (the highest) or
    val/forward_kl (the lowest); one that is better than all before is saved, whatever save_freq says."""
    balance_batch: bool = True
    """Give each worker the same work, long sequences counting more per token; false: contiguous slices."""
    log_val_generations: int = field(default=8, metadata=rules.NOT_NEGATIVE)
    """Held-out prompts, evenly from the data sources, whose answers are logged with each validation."""
    grace_period: float = field(default=60.0, metadata=rules.NOT_NEGATIVE)
    """Seconds that a run has to end the step in hand and save it after Ctrl-C, SIGTERM or a closed terminal; 0 ends it
    at once, as a second signal does. A step and a checkpoint, perhaps after one that is being written, have to fit
    into it."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto = cuda where a GPU is visible to the process that starts the run."""
    profile_steps: list[int] = field(default_factory=list, metadata=rules.STEPS)
    """Steps for which every worker runs torch's profiler: profile_step_N_worker_M.json.gz beside trace.json."""
    seed: int = field(default=0, metadata=rules.SEED)
    """Seed of the trainer's random states."""


@dataclass
class RolloutPoolConfig:
    """The rollout engine's own pool of workers, with actor_rollout_ref.hybrid_engine=false."""

    nnodes: int = field(default=1, metadata=rules.POSITIVE)
    """Machines of the pool."""
    n_gpus_per_node: int | None = field(default=None, metadata=rules.POSITIVE)
    """Workers per machine, one GPU each (on the CPU: worker processes), beside those of trainer.n_gpus_per_node."""


@dataclass
class RayInitConfig:
    """Connection to Ray."""

    address: str | None = None
    """Address of a running cluster; null starts one on this machine for the length of the run."""
    num_cpus: int | None = field(default=None, metadata=rules.POSITIVE)
    """CPUs that a local cluster offers; null takes all."""
    placement_timeout: float = field(default=30.0, metadata=rules.POSITIVE)
    """Seconds for the cluster to have room for the workers; more where it grows or others are about to leave."""


def updates_per_step(prompts: int, section: ActorConfig | CriticConfig) -> int:
    """Optimizer steps of a model in a training step of so many prompts."""
    return -(-prompts // (section.ppo_mini_batch_size or prompts)) * (section.ppo_epochs or 1)


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
        """The share of the tasks with a given answer that the student answers itself."""
        given = self.distillation.on_policy_fraction
        return given if given is not None else 0.0 if self.data.response_key is not None else 1.0

    @property
    def sft_coef(self) -> float:
        """Factor of the cross-entropy of given answers."""
        given = self.distillation.sft_coef
        return given if given is not None else 0.0 if self.distillation.enabled else 1.0

    @property
    def is_sft(self) -> bool:
        """Whether given answers are all that is learned from: neither a teacher nor rewards."""
        return not (self.distillation.enabled or self.on_policy_fraction)

    @property
    def trains_on_rewards(self) -> bool:
        """Whether the actor learns from rewards, alone or beside a teacher."""
        return self.distillation.use_task_rewards or not (self.distillation.enabled or self.is_sft)

    @property
    def has_advantages(self) -> bool:
        """Whether tokens have advantages, from rewards of the answers or from the teacher's log-ratios."""
        return self.trains_on_rewards or self.distillation.as_reward

    @property
    def has_sampled_loss(self) -> bool:
        """Whether a term of the actor's loss is of the sampled token, as a policy loss is and a divergence is not."""
        loss, actor = self.distillation, self.actor_rollout_ref.actor
        estimated = actor.use_kl_loss and KL_LOSSES[actor.kl_loss_type].signal == "sampled"
        divergences = weighted_divergences(loss.loss_mode, loss.mixed_weights, loss.loss_fn)
        return self.has_advantages or estimated or any(row.signal == "sampled" for _, row in divergences)

    @property
    def needs_rollout_logprobs(self) -> bool:
        """Whether the rollout engine returns log-probabilities: for corrections, or token weights of the user's own."""
        row = self.distillation.weighting
        return self.algorithm.compares_logprobs or (row is not None and row.needs == "teacher")

    @property
    def distils_alone(self) -> bool:
        """Whether distillation is the only term of the loss: tokens of weight 0 in it need not be computed then."""
        loss, actor = self.distillation, self.actor_rollout_ref.actor
        of_sequences = loss.use_policy_gradient and policy_loss(actor.policy_loss.loss_mode).of_sequences
        others = self.has_advantages or self.sft_coef or actor.use_kl_loss or actor.entropy_coeff or of_sequences
        return loss.enabled and not others

    @property
    def reward_weights(self) -> dict[str, float]:
        """What the reward is the weighted sum of. A reward model is alone unless `reward.functions` says otherwise."""
        alone = self.reward_model.enable and not self.reward.functions
        return {MODEL: 1.0} if alone else self.reward.weights

    @property
    def has_reward(self) -> bool:
        """Whether there is a reward: the default one needs the column with the right answers."""
        needs_answer = any(REWARD_FUNCTIONS.get(name, False) for name in self.reward_weights)
        return self.reward.answer_key is not None or not needs_answer

    @property
    def has_reward_functions(self) -> bool:
        """Whether functions say what an answer is worth, alone or beside a reward model."""
        return self.has_reward and self.reward_weights.keys() != {MODEL}

    @property
    def uses_reward_model(self) -> bool:
        """Whether a reward model scores answers, in training or in validations."""
        return self.reward_model.enable and (self.trains_on_rewards or bool(self.data.val_files))

    @property
    def world_size(self) -> int:
        """Number of workers that train."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def rollout_world_size(self) -> int:
        """Number of workers that generate: the same ones with a hybrid engine."""
        return self.rollout.nnodes * (self.rollout.n_gpus_per_node or 0) or self.world_size

    @property
    def workers_per_node(self) -> int:
        """Workers on one machine, all pools together."""
        return self.trainer.n_gpus_per_node + (self.rollout.n_gpus_per_node or 0)

    @property
    def shard_size(self) -> int:
        """Workers that share one copy of the student's weights."""
        size = self.actor_rollout_ref.actor.fsdp_config.fsdp_size
        return self.world_size if size == -1 else size

    @property
    def uses_critic(self) -> bool:
        """Whether advantages need a critic's values."""
        needed = ADV_ESTIMATORS.get(self.algorithm.adv_estimator) == "critic"
        return self.has_advantages and needed and not self.trainer.val_only

    @property
    def uses_reference(self) -> bool:
        """Whether the student is kept close to a reference policy."""
        needed = self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward
        return needed and not self.trainer.val_only

    @property
    def has_reference_model(self) -> bool:
        """Whether the reference policy is a model of its own: not where it is what lies below the LoRA adapters."""
        arr = self.actor_rollout_ref
        return self.uses_reference and not (arr.model.has_lora and arr.ref.model.path is None)

    @property
    def ref_topk(self) -> int:
        """Candidates per position that the reference policy is asked for; 0: of the sampled token alone."""
        arr = self.actor_rollout_ref
        return arr.ref.topk if arr.actor.use_kl_loss and arr.actor.kl_loss_type == "full" else 0

    @property
    def ref_model(self) -> ModelConfig:
        """The folder of the reference policy, and how it is loaded."""
        student, own = self.actor_rollout_ref.model, self.actor_rollout_ref.ref.model.path
        found = ModelConfig(path=own or student.path, trust_remote_code=student.trust_remote_code)
        found.override_config = student.override_config if own is None else {}
        return found

    @property
    def critic_shard_size(self) -> int:
        """Workers that share one copy of the critic's weights."""
        size = self.critic.fsdp_config.fsdp_size
        return self.world_size if size == -1 else size

    @property
    def resolved_critic(self) -> CriticConfig:
        """The section critic, with what holds for student and actor in the place of null."""
        own, student, actor = self.critic, self.actor_rollout_ref.model, self.actor_rollout_ref.actor
        model = _filled(own.model, student, without=() if own.model.path is None else ("override_config",))
        return dataclasses.replace(_filled(own, actor), model=model)

    @property
    def critic_model(self) -> ModelConfig:
        """The folder that the critic starts from, and how it is loaded."""
        own = self.resolved_critic.model
        found = {name: value for name, value in vars(own).items() if value is not None}
        return ModelConfig(**found)

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest possible prompt with its longest response."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def engine_length(self) -> int:
        """Tokens of the longest sequence that the rollout engine takes."""
        return self.actor_rollout_ref.rollout.max_model_len or self.max_sequence_length

    @property
    def teacher_length(self) -> int:
        """The same of a local teacher, which has to generate a token to score."""
        return self.actor_rollout_ref.teacher.max_model_len or self.max_sequence_length + 1

    @property
    def mini_batch_size(self) -> int:
        """Prompts per optimizer step."""
        return self.actor_rollout_ref.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def sft_updates(self) -> int:
        """Optimizer steps of the first `trainer.warmup_steps_sft` steps."""
        actor = self.actor_rollout_ref.actor
        return self.trainer.warmup_steps_sft * updates_per_step(self.data.train_batch_size, actor)

    def saves_while_training(self, steps: int | None) -> bool:
        """Whether training goes on after a checkpoint, in a run of so many steps; None: it is not known of how many."""
        trainer = self.trainer
        frequencies = [trainer.save_freq]
        if trainer.best_metric is not None:
            frequencies.append(trainer.test_freq)
        saves = any(every > 0 and (steps is None or every < steps) for every in frequencies)
        return saves and not trainer.val_only

    @property
    def experiment_dir(self) -> Path:
        """Folder of the checkpoints."""
        trainer = self.trainer
        return Path(trainer.default_local_dir).expanduser().absolute() / trainer.project_name / trainer.experiment_name

    @property
    def run_dir(self) -> Path:
        """Folder of what this run writes; with `trainer.val_only` a folder inside, as no training run is touched."""
        return self.experiment_dir / "validation" if self.trainer.val_only else self.experiment_dir


Section = TypeVar("Section", CriticConfig, CriticModelConfig)


def _filled(section: Section, other: Any, without: tuple[str, ...] = ()) -> Section:
    """A section with the values of another one in the place of null, where that has fields of the same names."""
    names = [name for name, value in vars(section).items() if value is None and name not in without]
    return dataclasses.replace(section, **{name: getattr(other, name) for name in names})
