"""The section actor_rollout_ref: student, rollout engine and teacher. See schema.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

from hybrid_gkd.config import metadata as rules
from hybrid_gkd.losses.table import KL_LOSSES, POLICY_LOSSES

TEACHER_PORT = 15555
"""Of a teacher service, unless another one is given."""
KL_LOSS = rules.rule(
    f"must be one of {', '.join(KL_LOSSES)}; k1 (verl: kl) as a loss would teach nothing, as its expected gradient is "
    "0: k1+ has its value, and the gradient of the KL",
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
    """Run model code that comes with the folder."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a quarter slower."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config.json to replace, e.g. {attention_dropout: 0.0}."""
    lora_rank: int = field(default=0, metadata=rules.NOT_NEGATIVE)
    """Rank of LoRA adapters, which are trained in the place of the weights; 0 trains the weights."""
    lora_alpha: int | None = field(default=None, metadata=rules.POSITIVE)
    """Adapters count lora_alpha / lora_rank; null takes 16, or what lora_adapter_path has."""
    target_modules: Any = field(default=None, metadata=rules.MODULES)
    """Layers with adapters: all-linear, a list of names such as [q_proj,v_proj], or a regular expression of the whole
    name; null takes all-linear (without the output head), or what lora_adapter_path has."""
    exclude_modules: Any = field(default=None, metadata=rules.MODULES)
    """Layers without, of those that target_modules names; a list of names, or a regular expression."""
    lora_adapter_path: str | None = None
    """Folder with a LoRA adapter of peft's to start from; its rank, alpha and layers are taken."""

    @property
    def has_lora(self) -> bool:
        """Whether adapters are trained in the place of the weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@dataclass
class ScheduleConfig:
    """A learning rate."""

    lr: float = field(default=1e-6, metadata=rules.POSITIVE)
    """Peak learning rate."""
    lr_warmup_steps: int = field(default=0, metadata=rules.NOT_NEGATIVE)
    """Optimizer steps of linear warm-up from 0."""
    lr_warmup_steps_ratio: float = field(default=0.0, metadata=rules.SHARE)
    """Warm-up as a share of the optimizer steps that the schedule is for, where lr_warmup_steps is 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up, until the last of these steps."""
    min_lr_ratio: float = field(default=0.0, metadata=rules.SHARE)
    """Share of the peak at which linear and cosine end."""


@dataclass
class OptimConfig(ScheduleConfig):
    """AdamW and its learning-rate schedule."""

    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata=rules.DECAY_RATES)
    """Decay rates of the two moments."""
    eps: float = field(default=1e-8, metadata=rules.POSITIVE)
    """Added to the root of the second moment."""
    weight_decay: float = field(default=0.01, metadata=rules.NOT_NEGATIVE)
    """Decoupled weight decay, on matrices only (not on biases and norms)."""


@dataclass
class FSDPConfig:
    """How the student is sharded and where it waits while it is not its turn (FSDP2)."""

    param_offload: bool = False
    """Keep parameters on the host when it is not the model's turn (no effect on the CPU, nor where it has a GPU for
    itself: in a pool without the rollout engine and a second model)."""
    optimizer_offload: bool = False
    """Keep optimizer state on the host outside of the optimizer step (no effect on the CPU)."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward pass; false: one gather per part of a batch, more memory."""
    model_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of master weights, Adam state and accumulated gradients; the compute type is bf16 on GPUs, fp32 on the CPU.
    With bf16 the gradients are rounded after every micro-batch, so the result depends slightly on the cut. With LoRA it
    is the adapters'; the frozen weights have the compute type."""
    fsdp_size: int = -1
    """Workers that share one copy of the weights; -1 = all. Smaller: hybrid sharding, with replicas across groups."""


@dataclass
class CheckpointConfig:
    """Optional parts of a checkpoint."""

    save_hf_model: bool = True
    """Also write a Hugging Face folder (`huggingface/`), which transformers and vLLM load; with LoRA, an adapter folder
    of peft's."""
    save_merged: bool = False
    """With LoRA, also write the whole model with the adapters merged into its weights (`huggingface_merged/`)."""


@dataclass
class PolicyLossConfig:
    """PPO's loss."""

    loss_mode: str = field(default="vanilla", metadata=rules.names(*POLICY_LOSSES, or_own=True))
    """vanilla (PPO's clipped ratio of a token), gspo (of a sequence), cispo (clipped weight, no token without
    gradient), gpg (no ratio), or module:name or file.py:name of a function like vanilla of
    hybrid_gkd/losses/policy.py. See docs/losses.md."""


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
    """Compile the decoder blocks: the first update takes longer. For architectures whose layers are not fused; where
    they are, it is slower (docs/performance.md)."""
    ppo_epochs: int = field(default=1, metadata=rules.POSITIVE)
    """Passes over each rollout."""
    grad_clip: float = field(default=1.0, metadata=rules.POSITIVE | rules.MAY_BE_INFINITE)
    """Largest global gradient norm; larger gradients are scaled down to it, with .inf none."""
    clip_ratio: float = field(default=0.2, metadata=rules.POSITIVE)
    """Clip range of PPO's probability ratio."""
    clip_ratio_low: float | None = field(default=None, metadata=rules.POSITIVE)
    """The range downwards; null takes clip_ratio."""
    clip_ratio_high: float | None = field(default=None, metadata=rules.POSITIVE)
    """The range upwards, larger in DAPO; null takes clip_ratio."""
    clip_ratio_c: float | None = field(default=None, metadata=rules.ABOVE_ONE)
    """Dual clip of policy_loss.loss_mode=vanilla: the ratio counts as this at most where the advantage is negative
    (verl: 3); null: no such bound."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    loss_agg_mode: str = field(default="token-mean", metadata=rules.names(*LOSS_AGG_MODES))
    """From the losses of tokens to that of a mini-batch: the mean over all tokens; or the mean over responses of their
    sum, of their mean, or of their sum divided by loss_scale_factor (Dr. GRPO)."""
    loss_scale_factor: int | None = field(default=None, metadata=rules.POSITIVE)
    """Tokens, for loss_agg_mode=seq-mean-token-sum-norm; null takes data.max_response_length."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the KL from the student to the reference policy to a token's loss."""
    kl_loss_coef: float = field(default=0.001, metadata=rules.NOT_NEGATIVE)
    """Factor of that KL."""
    kl_loss_type: str = field(default="k3", metadata=KL_LOSS)
    """Its estimate from the sampled token, see docs/losses.md: k2, half the squared log-ratio (verl: mse), k3 (verl:
    low_var_kl), k1+ and k3+, the values of k1 and k3 with the gradient of k2, or abs. full is the KL itself on the
    ref.topk most likely tokens of the reference and all others as one; not beside a teacher."""
    entropy_coeff: float = 0.0
    """This times the entropy of the student's distribution is taken off a token's loss."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    optim_sft: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(lr=1e-5))
    """The rate of the first trainer.warmup_steps_sft steps, and its schedule over them."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class CriticModelConfig:
    """The model that the critic starts from; a linear map to one value takes the place of its head."""

    path: str | None = None
    """Hugging Face folder or hub id of a causal language model; null takes the student's."""
    trust_remote_code: bool | None = None
    """Run model code that comes with the folder; null as for the student."""
    enable_gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass; null as for the student."""
    override_config: dict[str, Any] | None = None
    """Fields of the model's config.json to replace; null takes the student's, if the path is the student's."""


@dataclass
class CriticConfig:
    """The critic, which says what reward is to be expected; there is one if algorithm.adv_estimator=gae."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    ppo_mini_batch_size: int | None = field(default=None, metadata=rules.POSITIVE)
    """Prompts per optimizer step; null as for the actor."""
    ppo_epochs: int | None = field(default=None, metadata=rules.POSITIVE)
    """Passes over each rollout; null as for the actor."""
    use_dynamic_bsz: bool | None = None
    """Micro-batches by token count; false: by number of sequences; null as for the actor."""
    ppo_max_token_len_per_gpu: int | None = field(default=None, metadata=rules.POSITIVE)
    """Tokens (prompt and response) in one packed micro-batch; null as for the actor."""
    ppo_micro_batch_size_per_gpu: int | None = field(default=None, metadata=rules.POSITIVE)
    """Sequences in one micro-batch when use_dynamic_bsz is false; null as for the actor."""
    grad_clip: float = field(default=1.0, metadata=rules.POSITIVE | rules.MAY_BE_INFINITE)
    """Largest global gradient norm; larger gradients are scaled down to it, with .inf none."""
    cliprange_value: float = field(default=0.5, metadata=rules.POSITIVE | rules.MAY_BE_INFINITE)
    """How far a value may move from what it was before the rollout's first mini-batch until its error has no gradient
    any more, in units of the reward; .inf leaves that out."""
    loss_agg_mode: str | None = field(default=None, metadata=rules.names(*LOSS_AGG_MODES))
    """From the losses of tokens to that of a mini-batch; null as for the actor."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass
class ValKwargs:
    """Sampling in validation."""

    n: int = field(default=1, metadata=rules.POSITIVE)
    """Answers per held-out prompt; several need a temperature above 0."""
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
    """For `vllm.LLM(...)`; overrides what this program chooses, in compilation_config key by key."""


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
    fast_paths: bool = True
    """Use the shorter ways through vLLM's scheduler and model runner with versions that they were tried with; false
    leaves vLLM as it is."""
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
    end_repetitions: int | None = field(default=None, metadata=rules.ABOVE_ONE)
    """End an answer in which a pattern of up to 32 tokens has come so often in a row; null: never. Such an answer is
    trained on as one that was cut, and counted (response/ended_fraction). vLLM only, and slower: each token is looked
    at."""
    verify_weights: bool = False
    """After every publish, compare all of the engine's weights with the actor's; a difference ends the run."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)


@dataclass
class TeacherEngineKwargs:
    """Arguments handed to the scoring engine of a local service as they are."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """For `vllm.LLM(...)`, such as quantization: fp8."""
    hf: dict[str, Any] = field(default_factory=dict)
    """For `AutoModelForCausalLM.from_pretrained(...)`, with backend=hf."""


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
    """Requests in flight, for each copy of a local service's model."""
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
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of a local service's weights; auto = as stored, but half precision for what is stored as float32 with vllm;
    float32 on the CPU, where there is no other."""
    engine_kwargs: TeacherEngineKwargs = field(default_factory=TeacherEngineKwargs)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where a local service runs; auto = where the workers run: on GPUs that no worker needs, else sharing theirs."""
    tensor_model_parallel_size: int = field(default=1, metadata=rules.POSITIVE)
    """GPUs of each copy of a local service's model. On GPUs that it shares with the workers 1 is fastest: each has
    a copy then, and none waits for its turn on another GPU."""
    num_replicas: int | None = field(default=None, metadata=rules.POSITIVE)
    """Copies of a local service's model, which share the work; null takes one on GPUs of its own, and as many as there
    are GPUs for where it shares those of the workers, so that no worker waits for another that has the teacher."""
    gpu_memory_utilization: float | None = field(default=None, metadata=rules.SHARE)
    """Share of the GPU's memory for a local vLLM service; null takes 0.9 of GPUs of its own, and what the model needs
    to score where it shares them with the workers (printed by --dry-run)."""
    cache: str | None = None
    """Folder, on a local disk, that keeps the scores of given answers, so that repeated epochs and runs do not score
    them again. Filled by python -m hybrid_gkd.teacher score, a run needs no teacher beside it."""
    cache_gigabytes: float = field(default=50.0, metadata=rules.POSITIVE)
    """Size of that folder, 10^9 bytes, from which on nothing is added. A scored token takes about 6 * distillation.topk
    bytes."""
    max_model_len: int | None = field(default=None, metadata=rules.POSITIVE)
    """Longest sequence a local service scores; null takes prompt limit + response limit + 1."""
    model: TeacherModelConfig = field(default_factory=TeacherModelConfig)

    @property
    def is_stored(self) -> bool:
        """Whether scores come from the cache alone, without a model or service."""
        return self.cache is not None and self.server_ip is None and self.model.path is None

    @property
    def is_local(self) -> bool:
        """Whether the run starts a service of its own, if it needs one."""
        return self.server_ip is None and not self.is_stored

    @property
    def endpoints(self) -> list[str]:
        """host:port of every given service; empty where server_ip has an empty entry."""
        hosts = [host.strip() for host in (self.server_ip or "").split(",")]
        port = TEACHER_PORT if self.server_port is None else self.server_port
        return [host if ":" in host or not host else f"{host}:{port}" for host in hosts]


@dataclass
class RefModelConfig:
    """The model of the reference policy."""

    path: str | None = None
    """Hugging Face folder or hub id of a causal language model; null takes the student's, as it was before training."""


@dataclass
class RefConfig:
    """The reference policy, which actor.use_kl_loss and algorithm.use_kl_in_reward keep the student close to. It is
    frozen and never saved."""

    model: RefModelConfig = field(default_factory=RefModelConfig)
    topk: int = field(default=64, metadata=rules.POSITIVE)
    """Its candidates per position, for actor.kl_loss_type=full."""


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
    ref: RefConfig = field(default_factory=RefConfig)
