"""Configuration: one dataclass per section, a docstring per field, the rule of a value as field metadata.

config_loading.py reads YAML and overrides into these and checks rules between fields. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING

from hybrid_gkd import config_metadata as rules
from hybrid_gkd.losses.table import DIVERGENCES

BATCHES_AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}
"""trainer.scheduler -> how many batches generation is ahead of the update, and so the largest staleness."""
TEACHER_PORT = 15555
"""Of a teacher service, unless another one is given."""


@dataclass
class DataConfig:
    """Prompts for training and validation."""

    train_files: Any = MISSING
    """One or a list of: files (.jsonl, .json, .csv, each also .gz or .zst; .parquet), patterns, folders of files or of
    `save_to_disk`, `folder:split`, hub data sets `org/name[:config][:split]`."""
    val_files: Any = None
    """Like train_files; null switches validation off."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    max_prompt_length: int = field(default=1024, metadata=rules.POSITIVE)
    """Tokens, chat template included."""
    max_response_length: int = field(default=1024, metadata=rules.POSITIVE)
    """Tokens that the student may generate."""
    train_batch_size: int = field(default=128, metadata=rules.POSITIVE)
    """Prompts per training step, over all workers."""
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
class ModelConfig:
    """The student."""

    path: str = MISSING
    """Hugging Face folder or hub id of a causal language model."""
    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer; null takes `path`."""
    trust_remote_code: bool = False
    """Run model code that comes with the folder."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a quarter slower."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config.json to replace, e.g. {attention_dropout: 0.0}."""


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = field(default=1e-6, metadata=rules.POSITIVE)
    """Peak learning rate."""
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata=rules.DECAY_RATES)
    """Decay rates of the two moments."""
    eps: float = field(default=1e-8, metadata=rules.POSITIVE)
    """Added to the root of the second moment."""
    weight_decay: float = field(default=0.01, metadata=rules.NOT_NEGATIVE)
    """Decoupled weight decay, on matrices only (not on biases and norms)."""
    lr_warmup_steps: int = field(default=0, metadata=rules.NOT_NEGATIVE)
    """Optimizer steps of linear warm-up from 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up, until the last step of the run."""
    min_lr_ratio: float = field(default=0.0, metadata=rules.SHARE)
    """Share of the peak at which linear and cosine end."""


@dataclass
class FSDPConfig:
    """How the student is sharded and where it waits while it is not its turn (FSDP2)."""

    param_offload: bool = False
    """Keep parameters on the host in the rollout phase (no effect on the CPU, nor in a pool without the engine)."""
    optimizer_offload: bool = False
    """Keep optimizer state on the host outside of the optimizer step (no effect on the CPU)."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward pass; false: one gather per part of a batch, more memory."""
    model_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of master weights, Adam state and accumulated gradients; the compute type is bf16 on GPUs, fp32 on the CPU.
    With bf16 the gradients are rounded after every micro-batch, so the result depends slightly on the cut."""
    fsdp_size: int = -1
    """Workers that share one copy of the weights; -1 = all. Smaller: hybrid sharding, with replicas across groups."""


@dataclass
class CheckpointConfig:
    """Optional parts of a checkpoint."""

    save_hf_model: bool = True
    """Also write a Hugging Face folder (`huggingface/`), which transformers and vLLM load."""


@dataclass
class ActorConfig:
    """The update of the student."""

    ppo_mini_batch_size: int | None = field(default=None, metadata=rules.POSITIVE)
    """Prompts per optimizer step; null takes data.train_batch_size (one exactly on-policy step per rollout)."""
    use_dynamic_bsz: bool = True
    """Micro-batches by token count; false: by number of sequences."""
    ppo_max_token_len_per_gpu: int = field(default=16384, metadata=rules.POSITIVE)
    """Tokens (prompt and response) in one packed micro-batch."""
    ppo_micro_batch_size_per_gpu: int | None = field(default=None, metadata=rules.POSITIVE)
    """Sequences in one micro-batch when use_dynamic_bsz is false."""
    use_torch_compile: bool = False
    """Compile the decoder blocks: the first update takes longer, the others are faster and need less memory."""
    ppo_epochs: int = field(default=1, metadata=rules.POSITIVE)
    """Passes over each rollout."""
    grad_clip: float = field(default=1.0, metadata=rules.POSITIVE | rules.MAY_BE_INFINITE)
    """Largest global gradient norm; larger gradients are scaled down to it, with .inf none."""
    clip_ratio: float = field(default=0.2, metadata=rules.POSITIVE)
    """Clip range of PPO's probability ratio."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class ValKwargs:
    """Sampling in validation."""

    temperature: float = field(default=0.0, metadata=rules.NOT_NEGATIVE)
    """0 is greedy."""
    top_p: float = field(default=1.0, metadata=rules.NUCLEUS)
    """Nucleus mass."""
    top_k: int = field(default=-1, metadata=rules.TOP_K)
    """-1 keeps the whole vocabulary."""


@dataclass
class EngineKwargs:
    """Arguments handed to an engine as they are."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """For `vllm.LLM(...)`; overrides the arguments that this program chooses."""


@dataclass
class RolloutConfig:
    """Generation."""

    name: str = field(default="auto", metadata=rules.names("auto", "vllm", "hf", or_own=True))
    """Engine: vllm, hf (transformers, slow), auto = vllm where it is installed, or module:name of your own."""
    n: int = field(default=1, metadata=rules.POSITIVE)
    """Responses per prompt."""
    temperature: float = field(default=1.0, metadata=rules.POSITIVE)
    """Sampling temperature in training."""
    top_p: float = field(default=1.0, metadata=rules.NUCLEUS)
    """Nucleus mass; below 1 the samples are no longer drawn from the student's own distribution."""
    top_k: int = field(default=-1, metadata=rules.TOP_K)
    """-1 keeps the whole vocabulary."""
    tensor_model_parallel_size: int = field(default=1, metadata=rules.POSITIVE)
    """Workers that share one copy of the engine's weights."""
    gpu_memory_utilization: float | None = field(default=None, metadata=rules.SHARE)
    """Share of the GPU's memory for the engine's weights and KV cache; null takes what is free when the engine is
    built, and no more than max_num_seqs full sequences need (printed by --dry-run)."""
    free_cache_engine: bool = True
    """Release the engine's weights and KV cache during the update (vLLM sleep mode, GPUs only)."""
    enforce_eager: bool = False
    """No CUDA graphs: faster start, slower generation."""
    max_num_batched_tokens: int = field(default=8192, metadata=rules.POSITIVE)
    """Tokens in one engine step."""
    max_num_seqs: int = field(default=256, metadata=rules.POSITIVE)
    """Sequences generated at the same time per engine."""
    max_model_len: int | None = None
    """Longest sequence of the engine; null takes prompt limit + response limit."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the engine's weights; auto = bfloat16 on GPUs, float32 on the CPU."""
    seed: int = field(default=0, metadata=rules.SEED)
    """Seed of the sampling; every sequence gets its own from it."""
    update_weights_bucket_megabytes: int = field(default=512, metadata=rules.POSITIVE)
    """Weights gathered at once when they are published, MiB in the engine's type; smaller takes less memory."""
    verify_weights: bool = False
    """After every publish, compare all of the engine's weights with the actor's; a difference ends the run."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)


@dataclass
class TeacherModelConfig:
    """The model of a teacher that this run starts itself."""

    path: str | None = None
    """Hugging Face folder or hub id; its tokenizer must be the student's."""


@dataclass
class TeacherConfig:
    """The teacher service."""

    server_ip: str | None = None
    """Address of a running service; null starts one on this machine for the length of the run. Several services of
    one model, separated by commas, share the work; the others take over from one that fails. Each may be host:port."""
    server_port: int | None = field(default=None, metadata=rules.PORT)
    """Their port where server_ip names none, null for 15555; or that of a local service, null for any that is free."""
    keys: str | None = None
    """Folder with this client's keys (python -m hybrid_gkd.teacher keys), for services that were started with keys."""
    chat_template: str | None = None
    """What the teacher sees prompts behind, in place of the student's template: a file with a template, a folder with
    a tokenizer, or the template itself. Prompts have to fit behind both."""
    check_fit: bool = True
    """Compare chat templates and ends of answers with the student's, and let the teacher score some tokens of its own
    greedy answers to training prompts before the first step."""
    n_server_workers: int = field(default=8, metadata=rules.POSITIVE)
    """Requests in flight."""
    num_microbatches: int | None = field(default=8, metadata=rules.POSITIVE)
    """Sequences in one request at most; long ones travel in smaller groups. null takes the default."""
    overlap_rollout: bool = True
    """Send a sequence as soon as it is finished; false waits for the whole rollout."""
    connect_timeout: float = field(default=20.0, metadata=rules.POSITIVE)
    """Seconds for the handshake with a given server."""
    start_timeout: float = field(default=900.0, metadata=rules.POSITIVE)
    """Seconds for a local service to load its model."""
    request_timeout: float = field(default=600.0, metadata=rules.POSITIVE)
    """Seconds until a request, retries included, must be answered."""
    max_retries: int = field(default=3, metadata=rules.NOT_NEGATIVE)
    """Further attempts for a request that was not answered or not answered well."""
    backend: Literal["auto", "vllm", "hf"] = "auto"
    """Scoring engine of a local service; auto = vllm where it is installed."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where a local service runs; auto = where the workers run: on GPUs that no worker needs, else sharing theirs."""
    tensor_model_parallel_size: int = field(default=1, metadata=rules.POSITIVE)
    """GPUs of a local service."""
    gpu_memory_utilization: float | None = field(default=None, metadata=rules.SHARE)
    """Share of the GPU's memory for a local vLLM service; null takes 0.9 of GPUs of its own, and what the model needs
    to score where it shares them with the workers (printed by --dry-run)."""
    max_model_len: int | None = field(default=None, metadata=rules.POSITIVE)
    """Longest sequence a local service scores; null takes prompt limit + response limit + 1."""
    model: TeacherModelConfig = field(default_factory=TeacherModelConfig)

    @property
    def endpoints(self) -> list[str]:
        """host:port of every given service; empty where server_ip has an empty entry."""
        hosts = [host.strip() for host in (self.server_ip or "").split(",")]
        port = TEACHER_PORT if self.server_port is None else self.server_port
        return [host if ":" in host or not host else f"{host}:{port}" for host in hosts]


@dataclass
class ActorRolloutRefConfig:
    """Student, rollout engine and teacher."""

    hybrid_engine: bool = True
    """Student and rollout engine take turns on the same GPUs; false gives the engine a pool of its own (section
    rollout), where it generates while the student is updated (trainer.scheduler one_step_off or two_step_off)."""
    nccl_timeout: float = field(default=600.0, metadata=rules.POSITIVE)
    """Seconds that a collective, or a call to a worker, may take before the run ends with an error; in a generation,
    the inactivity timeout of a worker (with rollout.name=hf, of one batch)."""
    load_timeout: float = field(default=1800.0, metadata=rules.POSITIVE)
    """Seconds that the workers may take to start and to load their models, and to read or write a checkpoint."""
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)


@dataclass
class DistillationConfig:
    """The distillation loss."""

    enabled: bool = True
    """false trains with PPO on the rule reward and needs no teacher."""
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
    """Factor of the loss."""
    use_task_rewards: bool = False
    """Add PPO's policy loss on the rule reward."""
    loss_max_clamp: float | None = field(default=None, metadata=rules.POSITIVE)
    """Limit a token's divergence to plus or minus this, nats. A token beyond it has no gradient any more. With
    use_policy_gradient it is the advantage that is limited. actor/distillation/clamp_share says how many tokens are."""


@dataclass
class AlgorithmConfig:
    """Advantages of PPO, and importance weights."""

    adv_estimator: Literal["grpo"] = "grpo"
    """Reward relative to the other responses to the same prompt."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation."""
    rollout_is_threshold: float | None = None
    """Importance weights of stale responses (trainer.scheduler other than sync): every token's loss times
    min(prod of pi_current / pi_rollout up to it, threshold), threshold >= 1; null: none. Costs a forward pass."""


@dataclass
class CustomRewardFunction:
    """A reward function of your own."""

    path: str | None = None
    """Python file with a function `f(response: str, answer: str) -> float`."""
    name: str = "compute_score"
    """Name of the function."""


@dataclass
class RewardConfig:
    """Rule reward, for PPO and for validation."""

    name: Literal["exact_match", "gsm8k"] = "exact_match"
    """exact_match compares the stripped response; gsm8k compares the last number."""
    answer_key: str | None = None
    """Column with the right answer (dotted for nested ones, e.g. reward_model.ground_truth)."""
    custom_reward_function: CustomRewardFunction = field(default_factory=CustomRewardFunction)
    timeout: float = field(default=60.0, metadata=rules.POSITIVE | rules.MAY_BE_INFINITE)
    """Seconds that a function of your own may take for one response before the run ends with an error; .inf: any."""


@dataclass
class TrainerConfig:
    """The run."""

    scheduler: Literal["sync", "one_step_off", "two_step_off"] = "sync"
    """How far generation runs ahead of the update: sync = not at all; one_step_off, two_step_off = one or two batches,
    so that the teacher has that long to score; responses then come from weights up to one or two steps old."""
    total_epochs: int = field(default=1, metadata=rules.POSITIVE)
    """Passes over the prompts. What is left over at the end of one begins the next; only what fills no batch at the
    end of the last is left out, and said at the start."""
    total_training_steps: int | None = field(default=None, metadata=rules.POSITIVE)
    """Steps; null takes total_epochs. Wins over total_epochs where both are given."""
    project_name: str = field(default="hybrid_gkd", metadata=rules.FOLDER_NAME)
    """Project in wandb, folder under default_local_dir."""
    experiment_name: str = field(default="gkd", metadata=rules.FOLDER_NAME)
    """Run name in wandb, folder under the project."""
    logger: list[str] = field(default_factory=lambda: ["console", "wandb"], metadata=rules.TRACKERS)
    """Any of console, wandb, and module:name of your own. metrics.jsonl, generations.jsonl and run.log are parts of
    every run; the name jsonl is taken and changes nothing."""
    console: Literal["auto", "progress", "full"] = "auto"
    """How the console shows steps. full: a line for each, with the time and all metrics by name; progress: a bar, or
    without a terminal a short line every few seconds; auto: progress on a terminal, full in a file."""
    nnodes: int = field(default=1, metadata=rules.POSITIVE)
    """Machines of the Ray cluster."""
    n_gpus_per_node: int = field(default=1, metadata=rules.POSITIVE)
    """Workers per machine, one GPU each (on the CPU: worker processes)."""
    save_freq: int = field(default=-1, metadata=rules.FREQUENCY)
    """Steps between checkpoints; -1 saves only at the end, 0 never."""
    test_freq: int = field(default=-1, metadata=rules.FREQUENCY)
    """Steps between validations; -1 validates only before and after training."""
    val_before_train: bool = True
    """Validate the untrained student first."""
    val_only: bool = False
    """Validate what the run would start from, a checkpoint or the model, and end; data.train_files is not read."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto continues from the newest checkpoint of this experiment; resume_path from resume_from_path."""
    resume_from_path: str | None = None
    """A `global_step_N` folder."""
    allow_changed_config: bool = False
    """Continue although a key that decides what is learned (loss, rate, teacher, data, ...) is another than before."""
    default_local_dir: str = "outputs"
    """Where run folders go: <default_local_dir>/<project_name>/<experiment_name>."""
    max_actor_ckpt_to_keep: int | None = field(default=2, metadata=rules.POSITIVE)
    """Older checkpoints are removed; null keeps all."""
    balance_batch: bool = True
    """Give each worker the same work, long sequences counting more per token; false: contiguous slices."""
    log_val_generations: int = field(default=8, metadata=rules.NOT_NEGATIVE)
    """Sample generations logged with each validation."""
    grace_period: float = field(default=60.0, metadata=rules.NOT_NEGATIVE)
    """Seconds that a run has to end the step in hand and save it after Ctrl-C, SIGTERM or a closed terminal; 0 ends it
    at once, as a second signal does. A step and a checkpoint have to fit into it."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto = cuda where a GPU is visible."""
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


@dataclass
class Config:
    """The whole configuration."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutPoolConfig = field(default_factory=RolloutPoolConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

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
    def max_sequence_length(self) -> int:
        """Tokens of the longest possible prompt with its longest response."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def mini_batch_size(self) -> int:
        """Prompts per optimizer step."""
        return self.actor_rollout_ref.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def experiment_dir(self) -> Path:
        """Folder of the checkpoints."""
        trainer = self.trainer
        return Path(trainer.default_local_dir).expanduser().absolute() / trainer.project_name / trainer.experiment_name

    @property
    def run_dir(self) -> Path:
        """Folder of what this run writes; with `trainer.val_only` a folder inside, as no training run is touched."""
        return self.experiment_dir / "validation" if self.trainer.val_only else self.experiment_dir
