"""Compute the memory needs of models, rollout engine and teacher from the configurations of the run and its models."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hybrid_gkd.compat.vllm.versions import vllm_available
from hybrid_gkd.config import (
    ActorConfig,
    CheckpointConfig,
    Config,
    CriticConfig,
    RolloutConfig,
    RunTeacher,
    has_several_teachers,
    prompts_per_update,
    run_teachers,
)
from hybrid_gkd.models.spec import ModelSpec, critic_spec, model_spec, reward_model_spec
from hybrid_gkd.offload.budget import (
    EXCLUSIVE_FRACTION,
    SLEEPING_FRACTION,
    UPDATES,
    EngineMemory,
    Memory,
    TeacherPlacement,
)
from hybrid_gkd.offload.residency import EMA, FROZEN, MODEL_OWNERS

TEACHER_TOKENS = 32768
"""Minimum KV cache of a vLLM teacher on a shared GPU, tokens: four engine steps, so that one is filled while another is
scored."""
HF_TEACHER_TOKENS, HF_TEACHER_LOGITS_TOKENS = 16384, 2048
"""Tokens of one forward pass of a teacher with backend=hf, and of a model that computes the logits of all rows at once;
a single longer sequence is possible."""


def place_teacher(config: Config, *, device: str, gpus: int) -> TeacherPlacement | None:
    """Return a local teacher's placement for workers on `device` and `gpus` GPUs of this machine; None without one."""
    teacher, workers = config.actor_rollout_ref.teacher, config.workers_per_node
    if not config.distillation.enabled or not teacher.is_local:
        return None
    if (device if teacher.device == "auto" else teacher.device) == "cpu":
        return TeacherPlacement(teacher.num_replicas or 1)
    size = teacher.tensor_model_parallel_size
    shares = device == "cuda" and gpus < workers + size * (teacher.num_replicas or 1)
    replicas = teacher.num_replicas or (max(1, min(workers, gpus) // size) if shares else 1)
    first = workers if gpus >= workers + size * replicas else 0
    given = teacher.gpu_memory_utilization
    fraction = EXCLUSIVE_FRACTION if given is None and not shares else given
    return TeacherPlacement(replicas, tuple(range(first, first + size * replicas)), shares, fraction)


def place_teachers(config: Config, *, device: str, gpus: int) -> dict[str, TeacherPlacement]:
    """Return the placement of each teacher service that the run starts, by the label of its first teacher.

    Teachers are spread over the GPUs that no worker needs. If there are fewer of these than teachers, those that share
    a GPU divide its memory evenly or take turns (distillation.teacher_sharing).
    """
    teachers, found = run_teachers(config), dict[str, TeacherPlacement]()
    for teacher in teachers:
        place = place_teacher(teacher.config, device=device, gpus=gpus)
        found |= {teacher.label: place} if place is not None and teacher.service == teacher.label else {}
    exclusive = {label: place.gpus for label, place in found.items() if place.gpus and not place.shares_gpu}
    first, taken = min((own[0] for own in exclusive.values()), default=0), 0
    for label, own in exclusive.items():
        free = max(gpus - first, len(own))
        exclusive[label] = tuple(sorted(first + (taken + number) % free for number in range(len(own))))
        taken += len(own)
    users = Counter(itertools.chain.from_iterable(exclusive.values()))
    for teacher in teachers:
        if teacher.label in exclusive:
            own, fraction = exclusive[teacher.label], teacher.section.gpu_memory_utilization
            number = max(users[gpu] for gpu in own)
            even = math.floor(100 * EXCLUSIVE_FRACTION / number) / 100
            if config.distillation.teacher_sharing == "turns":
                even = EXCLUSIVE_FRACTION - SLEEPING_FRACTION * (number - 1)
            place = replace(found[teacher.label], gpus=own, fraction=even if fraction is None else fraction)
            found[teacher.label] = place
    if config.distillation.teacher_sharing == "turns":
        devices = {label: place.gpus or (-1,) for label, place in found.items()}  # -1: the CPU
        users = Counter(itertools.chain.from_iterable(devices.values()))
        shared = {label: any(users[each] > 1 for each in own) for label, own in devices.items()}
        found = {label: replace(place, takes_turns=shared[label]) for label, place in found.items()}
    return found


@dataclass(frozen=True)
class TrainedSpec:
    """The student, or the critic."""

    name: str
    """Name in `MODEL_OWNERS`."""
    spec: ModelSpec
    section: ActorConfig | CriticConfig
    shard_size: int
    has_average: bool = False
    """Whether a moving average of the trained weights is kept."""

    @property
    def master(self) -> int:
        """Return the bytes of the trained weights; gradients take as much, the optimizer state twice that."""
        return {"fp32": 4, "bf16": 2}[self.section.fsdp_config.model_dtype] * self.spec.trained_parameters

    @property
    def average(self) -> int:
        """Return the bytes of the moving average, in float32; 0 without one."""
        return 4 * self.spec.trained_parameters if self.has_average else 0

    @property
    def saved(self) -> int:
        """Return the bytes of a checkpoint: weights, both moments of the optimizer, and the moving average."""
        return 3 * self.master + self.average

    def saved_by(self, rank: int) -> float:
        """Return the bytes of a rank's part of a checkpoint; only the first replica is saved."""
        return self.saved / self.shard_size if rank < self.shard_size else 0.0


def trained_models(config: Config, spec: ModelSpec) -> tuple[TrainedSpec, ...]:
    """Return the student, with the given spec, and the critic if there is one. Raises ModelError, ConfigError."""
    student = TrainedSpec("actor", spec, config.actor_rollout_ref.actor, config.shard_size, config.has_moving_average)
    if not config.uses_critic:
        return (student,)
    return student, TrainedSpec("critic", critic_spec(config, spec), config.resolved_critic, config.critic_shard_size)


def plan_memory(
    config: Config, trained: tuple[TrainedSpec, ...], device: str,
    teachers: Mapping[str, TeacherPlacement] = MappingProxyType({}),
) -> Memory:
    """Return the memory of a run with local `teachers` by label. Raises ModelError, ConfigError."""
    arr, student, on_gpu = config.actor_rollout_ref, trained[0].spec, device == "cuda"
    owners, moves, passes = dict[str, float](), dict[str, bool](), dict[str, dict[str, float]]()
    itemsize, specs = 2 if on_gpu else 4, {"student": student}  # of the compute type
    for model in trained:
        (params, state), (update, step) = MODEL_OWNERS[model.name], UPDATES[model.name]
        fsdp, master = model.section.fsdp_config, model.master / model.shard_size
        owners |= {params: master, state: 2 * master}
        moves |= {params: fsdp.param_offload, state: fsdp.optimizer_offload}
        if model.spec.adapter_parameters:  # the frozen base weights
            owners[FROZEN], moves[FROZEN] = itemsize * model.spec.parameters / model.shard_size, fsdp.param_offload
        passes[update], passes[step] = {"gradients": master}, {"gradients": master}
        if on_gpu:
            # In bf16; FSDP2 copies on a single GPU too. One or two gathered blocks are not counted.
            gathered = model.spec.embedding_parameters if fsdp.reshard_after_forward else model.spec.parameters
            activations = _activations(config, model.section, model.spec)
            passes[update] |= {"gathered_params": 2 * gathered, "activations": activations}
        if model.has_average:
            owners[EMA], moves[EMA] = model.average / model.shard_size, True
            passes["ema_teacher"] = {"kept_params": master}
            if on_gpu:
                activations = _largest_micro_batch(config, model.section) * model.spec.forward_bytes_per_token
                passes["ema_teacher"] |= {"gathered_params": 2 * gathered, "activations": activations}
    for (owner, phase), (spec, tokens) in _other_models(config, student).items():
        specs[phase.replace("_", " ")] = spec
        owners[owner], moves[owner] = itemsize * spec.parameters / config.shard_size, True
        activations = tokens * spec.forward_bytes_per_token
        passes[phase] = {"gathered_params": 2 * spec.embedding_parameters, "activations": activations} if on_gpu else {}
    if not arr.hybrid_engine and moves.keys() <= {*MODEL_OWNERS["actor"], FROZEN, EMA}:  # no other owner needs the room
        moves |= dict.fromkeys({"actor_params", FROZEN} & owners.keys(), False)
    checkpoint = [sum(model.saved_by(rank) for model in trained) for rank in range(config.world_size)]
    checkpoint[0] += exported_bytes(arr.actor.checkpoint, trained[0])
    rollout = arr.rollout
    return Memory(
        device=device, specs=specs | {model.name: model.spec for model in trained[1:]}, owners=owners, moves=moves,
        passes=passes, checkpoint=tuple(checkpoint),
        hybrid=arr.hybrid_engine, sleeps=rollout.free_cache_engine, configured_fraction=rollout.gpu_memory_utilization,
        engine=_engine_memory(rollout, student, config.engine_length, device), teachers=dict(teachers),
        teacher_bytes={
            teacher.label: _teacher_bytes(teacher) for teacher in run_teachers(config)
            if teacher.label in teachers and teachers[teacher.label].fraction is None
        },
        loads_in_parallel=any(place.shares_gpu for place in teachers.values()) and _can_fix_caches(config),
    )  # fmt: skip


def _other_models(config: Config, student: ModelSpec) -> dict[tuple[str, str], tuple[ModelSpec, int]]:
    """Return owner and phase -> spec and tokens of the largest micro-batch, for models that are never trained."""
    found = dict[tuple[str, str], tuple[ModelSpec, int]]()
    if config.uses_reward_model:
        found["reward_model_params", "reward_model"] = reward_model_spec(config), _largest_reward_batch(config)
    if config.has_reference_model:
        model, spec = config.ref_model, student
        if config.actor_rollout_ref.ref.model.path is not None:
            spec = model_spec(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
        found["ref_params", "reference"] = spec, _largest_micro_batch(config, config.actor_rollout_ref.actor)
    return found


def exported_bytes(section: CheckpointConfig, student: TrainedSpec) -> int:
    """Return the bytes of the student's exports in a checkpoint, which rank 0 writes: all weights in the stored type,
    adapters in that of training."""
    whole = student.spec.stored_itemsize * student.spec.parameters
    own = student.master if student.spec.adapter_parameters else whole
    return section.save_hf_model * own + section.save_merged * whole


def engine_dtype(dtype: str, device: str) -> str:
    """Return the type of the engine's weights and KV cache on "cuda" or "cpu"; auto is the actor's compute type."""
    automatic = "bfloat16" if device == "cuda" else "float32"
    return automatic if dtype == "auto" else dtype


def _engine_memory(rollout: RolloutConfig, student: ModelSpec, longest: int, device: str) -> EngineMemory:
    itemsize, ranks = 4 if engine_dtype(rollout.dtype, device) == "float32" else 2, rollout.tensor_model_parallel_size
    weights, token = itemsize * student.parameters, itemsize / 2 * student.kv_bytes_per_token
    return EngineMemory(weights / ranks, token / ranks, longest, rollout.max_num_seqs)


def _largest_micro_batch(config: Config, section: ActorConfig | CriticConfig, prompts: int | None = None) -> int:
    """Return the tokens of the largest micro-batch of `prompts` prompts (None: a whole batch) on a GPU, unless a single
    sequence is longer."""
    longest, prompts = config.max_packed_length, prompts or config.data.train_batch_size
    whole = longest * math.ceil(prompts * config.actor_rollout_ref.rollout.n / config.world_size)
    if section.use_dynamic_bsz:
        return min(whole, section.ppo_max_token_len_per_gpu or whole)
    return min(whole, longest * (section.ppo_micro_batch_size_per_gpu or 1))


def _activations(config: Config, section: ActorConfig | CriticConfig, spec: ModelSpec) -> int:
    """Return the bytes of a model's largest micro-batch: of all blocks in an update, of one block in a forward pass."""
    prompts = prompts_per_update(config.data.train_batch_size, section)
    kept = _largest_micro_batch(config, section, prompts) * spec.activation_bytes_per_token
    compares = config.algorithm.compares_logprobs or config.distillation.use_policy_gradient
    passes = config.has_advantages or config.uses_reference or compares or config.teaches_itself
    if not passes and not config.data.val_files:  # distillation only: no log-probabilities are computed
        return kept
    return max(kept, _largest_micro_batch(config, section) * spec.forward_bytes_per_token)


def _largest_reward_batch(config: Config) -> int:
    """Return the tokens of the reward model's largest micro-batch, for texts as long as the student's."""
    section, actor = config.reward_model, config.actor_rollout_ref.actor
    texts = math.ceil(config.data.train_batch_size * config.actor_rollout_ref.rollout.n / config.world_size)
    whole = texts * min(config.max_sequence_length, section.max_length or config.max_sequence_length)
    return min(whole, section.forward_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu)


def _teacher_bytes(run_teacher: RunTeacher) -> tuple[float, float]:
    """Return the value of `Memory.teacher_bytes`; each adapter of the service counts as much as the largest one."""
    config, teacher = run_teacher.config, run_teacher.section
    assert teacher.model.path is not None
    read = functools.partial(
        model_spec, teacher.model.path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code
    )
    spec, adapters = read(), [read(lora=folder).adapter_parameters for _, folder in run_teacher.adapters]
    parameters = spec.parameters + len(adapters) * max(adapters, default=0)
    plain, longest = is_plain(teacher.backend), config.teacher_length
    as_stored = plain and teacher.dtype == "auto"  # vLLM converts float32 weights to half precision
    itemsize = 4 if teacher.dtype == "float32" or (as_stored and spec.stored_itemsize > 2) else 2
    cache = max(TEACHER_TOKENS, longest) * spec.kv_bytes_per_token  # vLLM requires room for one sequence
    beside_weights = _hf_forward_bytes(spec, longest) if plain else cache  # in 16 bits
    ranks = teacher.tensor_model_parallel_size
    return itemsize * parameters / ranks, itemsize / 2 * beside_weights / ranks


def is_plain(backend: str) -> bool:
    """Return whether a local teacher runs on transformers, not on vLLM."""
    return backend == "hf" or (backend == "auto" and not vllm_available())


def _hf_forward_bytes(spec: ModelSpec, longest: int) -> int:
    """Return a lower bound of the bytes of the largest forward pass with backend=hf, in 16 bits; there is no KV cache.

    `HFScoringEngine` processes T tokens at a time: up to its limit, or one sequence of `longest` tokens. Nothing is
    kept for a backward pass, so that only one block's activations exist: two arrays [T, D] and three [T, I], with the
    hidden size D and the intermediate size I. After them, a model that changes its logits has two arrays [T, V].
    float32 logits exist for 1024 rows at a time and are part of the workspace. Not counted are the scores of an
    attention that cannot be packed, [B, H, L, L] for B sequences of L tokens and H heads.
    """
    limit = HF_TEACHER_LOGITS_TOKENS if spec.logits_bytes_per_token else HF_TEACHER_TOKENS
    return max(limit, longest) * max(spec.forward_bytes_per_token, spec.logits_bytes_per_token)


def _can_fix_caches(config: Config) -> bool:
    """Return whether the KV caches of rollout engine and local teacher may have sizes of the plan: no fraction or cache
    is configured, the engine sleeps, and there is one teacher, with short sequences."""
    arr, key = config.actor_rollout_ref, "kv_cache_memory_bytes"
    sections = (arr.rollout, arr.teacher)
    given = any(each.gpu_memory_utilization is not None or key in each.engine_kwargs.vllm for each in sections)
    sleeps, short = arr.hybrid_engine and arr.rollout.free_cache_engine, 2 * config.teacher_length <= TEACHER_TOKENS
    return sleeps and short and not given and not has_several_teachers(config)


def with_planned_caches(config: Config, memory: Memory, total_bytes: int | None) -> Config | None:
    """Return the configuration with fixed KV cache sizes, so that rollout engine and local teacher can load in
    parallel; None if they cannot, see `Memory.fixed_cache`.

    On a shared GPU vLLM otherwise sizes its cache by the free memory, which must not change during that.
    """
    if total_bytes is None or (cache := memory.fixed_cache(total_bytes)) is None:
        return None
    arr, key = config.actor_rollout_ref, "kv_cache_memory_bytes"
    rollout, teacher = arr.rollout, arr.teacher
    own = {**rollout.engine_kwargs.vllm, key: int(cache)}
    engine_kwargs = replace(rollout.engine_kwargs, vllm=own)
    rollout = replace(rollout, gpu_memory_utilization=memory.engine_fraction(total_bytes), engine_kwargs=engine_kwargs)
    if not is_plain(teacher.backend):
        own = {**teacher.engine_kwargs.vllm, key: int(memory.teacher_bytes["teacher"][1])}
        teacher = replace(teacher, engine_kwargs=replace(teacher.engine_kwargs, vllm=own))
    return replace(config, actor_rollout_ref=replace(arr, rollout=rollout, teacher=teacher))
