"""The sections actor_rollout_ref and critic: student, rollout engine, teacher, reference, critic. See schema.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import II, MISSING

from hybrid_gkd.config import metadata as rules
from hybrid_gkd.losses.table import KL_LOSSES, POLICY_LOSSES

TEACHER_PORT = 15555
"""Default port of a teacher service."""
KL_LOSS = rules.rule(
    f"must be one of {', '.join(KL_LOSSES)}; k1 (verl: kl) cannot be a loss, since its expected gradient is 0: k1+ has "
    "its value and the gradient of the KL",
    lambda value: value in KL_LOSSES,
)
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass
class ModelConfig:
    """The student."""

    path: str = MISSING
    """Hugging Face folder or hub id of a causal language model."""
    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer; null takes `path`."""
    trust_remote_code: bool = False
    """Run model code from the folder."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a quarter slower."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config.json to replace, e.g. {attention_dropout: 0.0}."""
    lora_rank: int = field(default=0, metadata=rules.NOT_NEGATIVE)
    """Rank of LoRA adapters, which are trained instead of the weights; 0 trains the weights."""
    lora_alpha: int | None = field(default=None, metadata=rules.POSITIVE)
    """Scale of the adapters, lora_alpha / lora_rank; null takes 16, or that of lora_adapter_path."""
    target_modules: Any = field(default=None, metadata=rules.MODULES)
    """Layers with adapters: all-linear, a list of names such as [q_proj,v_proj], or a regular expression for the full
    name; null takes all-linear (without the output head), or those of lora_adapter_path."""
    exclude_modules: Any = field(default=None, metadata=rules.MODULES)
    """Layers of target_modules that get no adapters: a list of names, or a regular expression."""
    lora_adapter_path: str | None = None
    """Folder with a PEFT LoRA adapter to start from, which sets rank, alpha and layers."""

    @property
    def has_lora(self) -> bool:
        """Return whether adapters are trained instead of the weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@dataclass
class ScheduleConfig:
    """A learning-rate schedule."""

    lr: float = field(default=1e-6, metadata=rules.POSITIVE)
    """Peak learning rate."""
    lr_warmup_steps: int = field(default=0, metadata=rules.NOT_NEGATIVE)
    """Optimizer steps of linear warm-up from 0."""
    lr_warmup_steps_ratio: float = field(default=0.0, metadata=rules.FRACTION)
    """Warm-up as a fraction of the optimizer steps of the schedule, if lr_warmup_steps is 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, until the last optimizer step of the schedule."""
    min_lr_ratio: float = field(default=0.0, metadata=rules.FRACTION)
    """Final rate of linear and cosine as a fraction of the peak."""


@dataclass
class OptimConfig(ScheduleConfig):
    """AdamW and its learning-rate schedule."""

    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata=rules.DECAY_RATES)
    """Decay rates of the two moments."""
    eps: float = field(default=1e-8, metadata=rules.POSITIVE)
    """Term added to the root of the second moment."""
    weight_decay: float = field(default=0.01, metadata=rules.NOT_NEGATIVE)
    """Decoupled weight decay, on matrices only (not on biases and norms)."""


@dataclass
class FSDPConfig:
    """Sharding and offloading of a model (FSDP2)."""

    param_offload: bool = False
    """Keep parameters on the host while the model is idle (no effect on the CPU, nor if the model has its GPU for
    itself: in a pool without the rollout engine and a second model)."""
    optimizer_offload: bool = False
    """Keep optimizer state on the host outside of the optimizer step (no effect on the CPU)."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward pass; false gathers once per part of a batch and needs more
    memory."""
    model_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of master weights, Adam state and accumulated gradients; the compute type is bf16 on GPUs, fp32 on the CPU.
    With bf16 the gradients are rounded after every micro-batch, so that results depend slightly on their sizes. With
    LoRA it is the type of the adapters; frozen weights have the compute type."""
    fsdp_size: int = -1
    """Workers that share one copy of the weights; -1: all. Smaller: hybrid sharding, with replicas across groups."""
    full_determinism: bool = False
    """Two runs of the same seeds on the same machine, on the CPU, have the same metrics to the last digit. The teacher
    then gets a rollout when it is complete, in one request at a time, and the update begins when all is scored. For the
    actor or the critic: it holds for the run."""


@dataclass
class CheckpointConfig:
    """Optional parts of a checkpoint."""

    save_hf_model: bool = True
    """Also write a Hugging Face folder (`huggingface/`) for transformers and vLLM; with LoRA, a PEFT adapter folder."""
    save_merged: bool = False
    """With LoRA, also write the whole model with the adapters merged into its weights (`huggingface_merged/`)."""


@dataclass
class PolicyLossConfig:
    """PPO's loss."""

    loss_mode: str = field(default="vanilla", metadata=rules.names(*POLICY_LOSSES, or_own=True))
    """vanilla (PPO's clipped ratio of a token), gspo (of a sequence), cispo (clipped weight, all tokens have a
    gradient), gpg (no ratio), or module:name or file.py:name of a function like vanilla of hybrid_gkd/losses/policy.py.
    See docs/ppo.md."""


@dataclass
class ActorConfig:
    """The update of the student."""

    ppo_mini_batch_size: int | None = field(default=None, metadata=rules.POSITIVE)
    """Prompts per optimizer step; null takes a quarter of data.train_batch_size. All of it makes one exactly on-policy
    step per rollout: fewer steps that learn less from as many completions (docs/losses.md)."""
    use_dynamic_bsz: bool = True
    """Form micro-batches by token count; false: by number of sequences."""
    ppo_max_token_len_per_gpu: int = field(default=16384, metadata=rules.POSITIVE)
    """Maximum number of tokens (prompt and response) in one packed micro-batch."""
    ppo_micro_batch_size_per_gpu: int | None = field(default=None, metadata=rules.POSITIVE)
    """Sequences in one micro-batch if use_dynamic_bsz is false."""
    use_torch_compile: bool = False
    """Compile the decoder blocks: the first update takes longer. Only for architectures without fused layers; it is
    slower than those (benchmarks/log/training.md)."""
    ppo_epochs: int = field(default=1, metadata=rules.POSITIVE)
    """Passes over each rollout."""
    grad_clip: float = field(default=1.0, metadata=rules.POSITIVE | rules.MAY_BE_INFINITE)
    """Maximum global gradient norm; larger gradients are scaled down to it; .inf disables clipping."""
    clip_ratio: float = field(default=0.2, metadata=rules.POSITIVE)
    """Clip range of PPO's probability ratio."""
    clip_ratio_low: float | None = field(default=None, metadata=rules.POSITIVE)
    """Lower clip range; null takes clip_ratio."""
    clip_ratio_high: float | None = field(default=None, metadata=rules.POSITIVE)
    """Upper clip range, larger in DAPO; null takes clip_ratio."""
    clip_ratio_c: float | None = field(default=None, metadata=rules.ABOVE_ONE)
    """Dual-clip bound of the ratio for negative advantages, with policy_loss.loss_mode=vanilla (verl: 3); null: no
    bound."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    loss_agg_mode: str = field(default="token-mean", metadata=rules.names(*LOSS_AGG_MODES))
    """Aggregation of token losses over a mini-batch: the mean over all tokens; or the mean over responses of their sum,
    of their mean, or of their sum divided by loss_scale_factor (Dr. GRPO)."""
    loss_scale_factor: int | None = field(default=None, metadata=rules.POSITIVE)
    """Divisor in tokens for loss_agg_mode=seq-mean-token-sum-norm; null takes data.max_response_length."""
    use_kl_loss: bool = False
    """Add the KL from the student to the reference policy, times kl_loss_coef, to each token's loss."""
    kl_loss_coef: float = field(default=0.001, metadata=rules.NOT_NEGATIVE)
    """Factor of that KL."""
    kl_loss_type: str = field(default="k3", metadata=KL_LOSS)
    """Estimator of that KL from the sampled token, see docs/ppo.md: k2, half the squared log-ratio (verl: mse), k3
    (verl: low_var_kl), k1+ and k3+, the values of k1 and k3 with the gradient of k2, or abs. full is the exact KL on
    the ref.topk most likely tokens of the reference and a bucket of all others; not with a teacher."""
    entropy_coeff: float = 0.0
    """Factor of the entropy of the student's distribution, which is subtracted from each token's loss."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    optim_sft: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(lr=1e-5))
    """Learning rate and schedule of the first trainer.warmup_steps_sft steps."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class CriticModelConfig:
    """The model that the critic is initialised from; its head is replaced by a linear map to one value."""

    path: str | None = None
    """Hugging Face folder or hub id of a causal language model; null takes the student's."""
    trust_remote_code: bool | None = None
    """Run model code from the folder; null as for the student."""
    enable_gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass; null as for the student."""
    override_config: dict[str, Any] | None = None
    """Fields of the model's config.json to replace; null takes the student's, if the path is the student's."""


@dataclass
class CriticConfig:
    """The critic, a value function; it exists with algorithm.adv_estimator=gae."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    ppo_mini_batch_size: int | None = field(default=None, metadata=rules.POSITIVE)
    """Prompts per optimizer step; null as for the actor."""
    ppo_epochs: int | None = field(default=None, metadata=rules.POSITIVE)
    """Passes over each rollout; null as for the actor."""
    use_dynamic_bsz: bool | None = None
    """Form micro-batches by token count; false: by number of sequences; null as for the actor."""
    ppo_max_token_len_per_gpu: int | None = field(default=None, metadata=rules.POSITIVE)
    """Maximum number of tokens (prompt and response) in one packed micro-batch; null as for the actor."""
    ppo_micro_batch_size_per_gpu: int | None = field(default=None, metadata=rules.POSITIVE)
    """Sequences in one micro-batch if use_dynamic_bsz is false; null as for the actor."""
    grad_clip: float = field(default=1.0, metadata=rules.POSITIVE | rules.MAY_BE_INFINITE)
    """Maximum global gradient norm; larger gradients are scaled down to it; .inf disables clipping."""
    cliprange_value: float = field(default=0.5, metadata=rules.POSITIVE | rules.MAY_BE_INFINITE)
    """Maximum change of a value since the rollout's first mini-batch before its error has no gradient, in units of the
    reward; .inf disables the limit."""
    loss_agg_mode: str | None = field(default=None, metadata=rules.names(*LOSS_AGG_MODES))
    """Aggregation of token losses over a mini-batch; null as for the actor."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass
class ValKwargs:
    """Sampling in validation."""

    n: int = field(default=1, metadata=rules.POSITIVE)
    """Responses per held-out prompt; more than 1 needs a temperature above 0."""
    temperature: float = field(default=0.0, metadata=rules.TEMPERATURE_OR_GREEDY)
    """0 is greedy."""
    top_p: float = field(default=1.0, metadata=rules.NUCLEUS)
    """Nucleus mass."""
    top_k: int = field(default=-1, metadata=rules.TOP_K)
    """-1 keeps the whole vocabulary."""


@dataclass
class EngineKwargs:
    """Arguments that are passed to an engine unchanged."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.LLM(...)`; they override those of this program, in compilation_config key by key."""


@dataclass
class RolloutConfig:
    """Generation."""

    name: str = field(default="auto", metadata=rules.names("auto", "vllm", "hf", or_own=True))
    """Engine: vllm, hf (transformers, slow), auto = vllm if installed, or module:name of a custom one."""
    n: int = field(default=1, metadata=rules.POSITIVE)
    """Responses per prompt."""
    temperature: float = field(default=1.0, metadata=rules.TEMPERATURE)
    """Sampling temperature in training."""
    top_p: float = field(default=1.0, metadata=rules.NUCLEUS)
    """Nucleus mass; below 1 the samples are not drawn from the student's own distribution."""
    top_k: int = field(default=-1, metadata=rules.TOP_K)
    """-1 keeps the whole vocabulary."""
    tensor_model_parallel_size: int = field(default=1, metadata=rules.POSITIVE)
    """Workers that share one copy of the engine's weights."""
    gpu_memory_utilization: float | None = field(default=None, metadata=rules.FRACTION)
    """Fraction of the GPU's memory for the engine's weights and KV cache; null computes it from the free memory,
    limited to what max_num_seqs full sequences need (printed by --dry-run)."""
    free_cache_engine: bool = True
    """Release the engine's weights and KV cache during the update (vLLM sleep mode, GPUs only)."""
    enforce_eager: bool = False
    """No CUDA graphs: faster start, slower generation."""
    fast_paths: bool = True
    """Use optimized replacements of vLLM's scheduler and model runner with tested vLLM versions; false uses vLLM's
    own."""
    max_num_batched_tokens: int = field(default=8192, metadata=rules.POSITIVE)
    """Maximum number of tokens in one engine step."""
    max_num_seqs: int = field(default=256, metadata=rules.POSITIVE)
    """Maximum number of sequences generated at the same time per engine."""
    max_model_len: int | None = None
    """Longest sequence of the engine, tokens; null takes prompt limit + response limit."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the engine's weights; auto = bfloat16 on GPUs, float32 on the CPU."""
    seed: int = field(default=II("trainer.seed"), metadata=rules.SEED)
    """Seed of the sampling, from which the seed of each sequence is derived; by default trainer.seed."""
    update_weights_bucket_megabytes: int = field(default=512, metadata=rules.POSITIVE)
    """Size of the buckets in which weights are gathered and published, MiB in the engine's type; smaller ones save
    memory."""
    end_repetitions: int | None = field(default=None, metadata=rules.ABOVE_ONE)
    """End a response when a pattern of 1 to 32 tokens has been repeated this often; null: never. Such a response is
    trained on like a truncated one, and counted (response/ended_fraction). Not in validation. vLLM only; slower, since
    each token is checked."""
    verify_weights: bool = False
    """Compare all of the engine's weights with the actor's after every publish; a difference ends the run."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)


@dataclass
class TeacherEngineKwargs:
    """Arguments that are passed to the scoring engine of a local service unchanged."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.LLM(...)`, such as quantization: fp8."""
    hf: dict[str, Any] = field(default_factory=dict)
    """Arguments of `AutoModelForCausalLM.from_pretrained(...)`, with backend=hf."""


@dataclass
class TeacherModelConfig:
    """The model of a teacher that this run starts itself."""

    path: str | None = None
    """Hugging Face folder or hub id; its tokenizer must be the student's, unless distillation.cross_tokenizer allows
    another. With server_ip only the tokenizer is read, for cross_tokenizer."""
    lora_adapter_path: str | None = None
    """Folder with a PEFT LoRA adapter of that model. Teachers of one model, with or without adapters, that agree in the
    service's settings share one service, which has the model once."""


@dataclass
class TeacherConfig:
    """The teacher: a service, or the student itself."""

    source: Literal["model", "initial", "ema", "live"] = "model"
    """The teacher's weights. model: a service with `model.path` or at `server_ip`, or `cache`. Without a service, the
    student's own, on its workers: at the start of the run (initial; with LoRA the model below the adapters), their
    moving average (ema), or the present ones behind another prompt (live). See docs/teacher.md."""
    ema_decay: float = field(default=0.99, metadata=rules.DECAY)
    """Decay of the moving average at each optimizer step, with source=ema: average = ema_decay * average +
    (1 - ema_decay) * weights, in float32."""
    server_ip: str | None = None
    """Address of a running service; null starts one on this machine for the duration of the run. Several services of
    one model, separated by commas, share the work and replace each other after a failure. Each may be host:port."""
    server_port: int | None = field(default=None, metadata=rules.PORT)
    """Port of the services that server_ip gives without one, null for 15555; or of a local service, null for any free
    port."""
    keys: str | None = None
    """Folder with this client's keys (python -m hybrid_gkd.teacher keys), for services that require keys."""
    adapter: str | None = None
    """Name of the adapter that scores, at a running service with several (`serve --adapters`); null takes its model
    without one."""
    chat_template: str | None = None
    """The teacher's chat template, in place of the student's: a file with a template, a folder with a tokenizer, or the
    template itself. Prompts must fit with both templates."""
    check_fit: bool = True
    """Compare chat template and end-of-text tokens with the student's, and check before the first step that the teacher
    assigns a high probability to its own greedy completions of training prompts."""
    allow_teacher_change: bool = False
    """Train on where a service or a resumed run has another teacher than before: another model, or other weights under
    the same name. false refuses it."""
    n_server_workers: int = field(default=8, metadata=rules.POSITIVE)
    """Maximum number of requests in flight, for each replica of a local service's model."""
    num_microbatches: int | None = field(default=8, metadata=rules.POSITIVE)
    """Maximum number of sequences in one request; long ones are sent in smaller groups. null takes the default."""
    overlap_rollout: bool = True
    """Send a sequence as soon as it is finished; false waits for the whole rollout."""
    connect_timeout: float = field(default=20.0, metadata=rules.POSITIVE)
    """Timeout of the handshake with a given server, seconds."""
    start_timeout: float = field(default=900.0, metadata=rules.POSITIVE)
    """Timeout for a local service to load its model, seconds."""
    request_timeout: float = field(default=600.0, metadata=rules.POSITIVE)
    """Timeout of a request, retries included, seconds."""
    max_retries: int = field(default=3, metadata=rules.NOT_NEGATIVE)
    """Further attempts for a request that failed or got an invalid reply."""
    backend: Literal["auto", "vllm", "hf"] = "auto"
    """Scoring engine of a local service; auto = vllm if installed."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of a local service's weights; auto = as stored, but half precision for weights stored as float32 with vllm;
    on the CPU always float32."""
    engine_kwargs: TeacherEngineKwargs = field(default_factory=TeacherEngineKwargs)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of a local service; auto = that of the workers: on GPUs that no worker needs, else shared with workers."""
    tensor_model_parallel_size: int = field(default=1, metadata=rules.POSITIVE)
    """GPUs of each replica of a local service's model. On GPUs shared with workers 1 is fastest: each GPU then has a
    replica, and none waits for another GPU."""
    num_replicas: int | None = field(default=None, metadata=rules.POSITIVE)
    """Replicas of a local service's model, which share the work; null takes one on GPUs of its own, and one per GPU on
    GPUs shared with workers, so that no worker waits for another one's GPU."""
    gpu_memory_utilization: float | None = field(default=None, metadata=rules.FRACTION)
    """Fraction of the GPU's memory for a local vLLM service; null takes 0.9 of GPUs of its own, and what scoring needs
    on GPUs shared with workers (printed by --dry-run)."""
    cache: str | None = None
    """Folder on a local disk that keeps the scores of given completions, so that further epochs and runs do not score
    them again. If python -m hybrid_gkd.teacher score has filled it, a run needs no teacher."""
    cache_gigabytes: float = field(default=50.0, metadata=rules.POSITIVE)
    """Maximum size of that folder, 10^9 bytes; nothing is added beyond it. A scored token takes about 6 *
    distillation.topk bytes."""
    max_model_len: int | None = field(default=None, metadata=rules.POSITIVE)
    """Longest sequence that a local service scores, tokens; null takes prompt limit + response limit + 1, with
    distillation.cross_tokenizer + twice the response limit."""
    model: TeacherModelConfig = field(default_factory=TeacherModelConfig)

    @property
    def is_set(self) -> bool:
        """Return whether there is such a teacher: a model, a service, stored scores, or the student."""
        given = (self.model.path, self.server_ip, self.cache)
        return self.source != "model" or any(each is not None for each in given)

    @property
    def is_stored(self) -> bool:
        """Return whether scores come from the cache only, without a model or service."""
        without = self.server_ip is None and self.model.path is None
        return self.source == "model" and self.cache is not None and without

    @property
    def is_local(self) -> bool:
        """Return whether the run starts a service itself, if it needs one."""
        return self.source == "model" and self.server_ip is None and not self.is_stored

    @property
    def endpoints(self) -> list[str]:
        """Return host:port of every given service; an empty entry of server_ip stays empty."""
        hosts = [host.strip() for host in (self.server_ip or "").split(",")]
        port = TEACHER_PORT if self.server_port is None else self.server_port
        return [host if ":" in host or not host else f"{host}:{port}" for host in hosts]


@dataclass
class NamedTeacherConfig(TeacherConfig):
    """One of several teachers, with the fields of actor_rollout_ref.teacher."""

    key: str | None = None
    """Value of the column distillation.teacher_key in the rows that this teacher scores; null takes its name below
    distillation.teacher_models. `default` scores all rows without another teacher."""
    weight: float = field(default=1.0, metadata=rules.POSITIVE)
    """Weight among the teachers with the same key, relative to their sum, with distillation.ensemble=mixture; factor of
    the teacher's loss with sum."""


@dataclass
class RefModelConfig:
    """The model of the reference policy."""

    path: str | None = None
    """Hugging Face folder or hub id of a causal language model; null takes the student's initial weights."""


@dataclass
class RefConfig:
    """The frozen reference policy of actor.use_kl_loss and algorithm.use_kl_in_reward; it is never saved."""

    model: RefModelConfig = field(default_factory=RefModelConfig)
    topk: int = field(default=64, metadata=rules.POSITIVE)
    """Candidates per position, for actor.kl_loss_type=full."""


@dataclass
class ActorRolloutRefConfig:
    """Student, rollout engine and teacher."""

    hybrid_engine: bool = True
    """Let student and rollout engine alternate on the same GPUs; false gives the engine its own pool (section rollout),
    in which it generates while the student is updated (trainer.scheduler one_step_off or two_step_off)."""
    nccl_timeout: float = field(default=600.0, metadata=rules.POSITIVE)
    """Timeout of a collective or a call to a worker, seconds, after which the run ends with an error; in a generation,
    the inactivity timeout of a worker (with rollout.name=hf, of one batch)."""
    load_timeout: float = field(default=1800.0, metadata=rules.POSITIVE)
    """Timeout for workers to start and load their models, and to read or write a checkpoint, seconds."""
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    ref: RefConfig = field(default_factory=RefConfig)
