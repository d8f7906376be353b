"""Fast scheduling of decode steps for rollouts in vLLM, with little work on the host.

vLLM's scheduler decides in every step what each sequence may compute, which takes longer than the GPU needs for a small
model. In most steps of a rollout there is nothing to decide: no sequence can be admitted, the KV cache has room, and
every running sequence computes one token. `engine_args` gives an engine a subclass of its scheduler that handles these
steps itself, with the same state changes as vLLM's code, and leaves all other steps to vLLM. The scheduler outputs
tokens once per sequence, at its end; log-probabilities are kept as numbers and returned by `take_logprobs`.

It works with and without asynchronous scheduling and with both model runners. For untested versions of vLLM, and for
engines with features beyond rollouts, vLLM's scheduler is used, and a warning gives the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from hybrid_gkd.compat.vllm import versions as vllm_compat

logger = logging.getLogger(__name__)

LEFT = "rollout engine: vLLM schedules every step itself, which is slower: %s"
TESTED_VERSIONS = ((0, 26), (0, 32))
"""Versions of vLLM whose tokens were compared by tests/same_tokens.py: 0.26 on a GPU, 0.32 on the CPU."""
NEEDED = (
    "running", "requests", "kv_cache_manager", "kv_cache_config", "max_model_len", "max_num_running_reqs",
    "max_num_scheduled_tokens", "current_step", "sched_step_seq", "processed_step_seq", "defer_block_free",
    "deferred_frees", "finished_req_ids", "finished_req_ids_dict", "reset_preempted_req_ids", "use_v2_model_runner",
    "prev_step_scheduled_req_ids", "get_request_counts", "_inflight_prefills", "_pause_state", "_free_request",
    "_drain_deferred_frees", "_get_new_block_ids_to_zero",
)
"""Attributes of vLLM's scheduler that the fast path uses."""
STEPS_IN_FLIGHT = 3
"""Upper bound of vLLM's steps in flight, without pipeline parallelism."""


def engine_args(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for the fast path; empty, with a warning, if this vLLM was not tested.

    Also empty if `given`, the arguments of the user, have a scheduler.
    """
    reason = vllm_compat.untested_reason(TESTED_VERSIONS)
    if "scheduler_cls" in given:
        reason = "engine_kwargs.vllm.scheduler_cls is given"
    if reason is None:
        try:
            _parts_of_vllm()
        except ImportError as error:
            reason = f"this vLLM is built differently: {error}"
    if reason is not None:
        logger.warning(LEFT, reason)
        return {}
    # vLLM warns that custom schedulers may be incompatible and not asynchronous; this one was tested, and is.
    logging.getLogger("vllm.config.scheduler").addFilter(lambda record: "custom scheduler class" not in str(record.msg))
    return {"scheduler_cls": RolloutScheduler}


def short_path(engine: Any) -> Any:
    """Return the scheduler of an engine (vLLM's LLMEngine, in this process) if it has the fast path, else None."""
    scheduler = engine.engine_core.engine_core.scheduler
    return scheduler if isinstance(scheduler, FastDecodeScheduler) else None


class RolloutScheduler:
    """Factory for vLLM's argument `scheduler_cls`: makes vLLM's scheduler with the fast path or, with a warning,
    without it.

    vLLM takes one class before it decides about asynchronous scheduling, so the base class is chosen here.
    """

    def __new__(cls, vllm_config: Any, **arguments: Any) -> Any:
        vllm = _parts_of_vllm()
        base: Any = vllm.AsyncScheduler if vllm_config.scheduler_config.async_scheduling else vllm.Scheduler
        try:
            unusual = _unusual(vllm_config, **arguments)
            reason = f"the engine uses {', '.join(unusual)}" if unusual else None
        except AttributeError as error:
            reason = f"this vLLM is built differently: {error}"
        if reason is None:
            fast = type(f"Decode{base.__name__}", (FastDecodeScheduler, base), {"vllm": base})
            scheduler = fast(vllm_config, **arguments)
            missing = [name for name in NEEDED if not hasattr(scheduler, name)]
            if not missing:
                scheduler.begin(vllm)
                return scheduler
            reason = f"the scheduler has no {', '.join(missing)}"
        logger.warning(LEFT, reason)
        return base(vllm_config, **arguments)


def _parts_of_vllm() -> SimpleNamespace:
    """Return the parts of vLLM that the fast path uses. Raises ImportError."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.sched.utils import check_stop, remove_all
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.request import RequestStatus

    return SimpleNamespace(
        AsyncScheduler=AsyncScheduler, PauseState=PauseState, CachedRequestData=CachedRequestData,
        SchedulerOutput=SchedulerOutput, Scheduler=Scheduler, check_stop=check_stop, remove_all=remove_all,
        EngineCoreOutput=EngineCoreOutput, EngineCoreOutputs=EngineCoreOutputs, FullAttentionSpec=FullAttentionSpec,
        RequestStatus=RequestStatus,
    )


def _unusual(
    config: Any, *, kv_cache_config: Any, include_finished_set: bool, log_stats: bool, **arguments: Any
) -> list[str]:
    """Return the names of used features that the fast path does not support."""
    of_experts = (config.model_config, getattr(config, "aux_output_config", None))  # in 0.26, and in 0.32
    features = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "connectors": config.kv_transfer_config is not None or config.ec_transfer_config is not None,
        "statistics": log_stats,
        "several clients": include_finished_set,
        "priorities": config.scheduler_config.policy != "fcfs",
        "cascade attention": not config.model_config.disable_cascade_attn,
        "an encoder": config.model_config.is_encoder_decoder,
        "aligned state blocks": kv_cache_config.has_mamba_layers and config.cache_config.mamba_cache_mode == "align",
        "routed experts": any(getattr(each, "enable_return_routed_experts", False) for each in of_experts),
        "KV cache events": bool(config.kv_events_config and config.kv_events_config.enable_kv_cache_events),
    }
    return [name for name, used in features.items() if used]


class FastDecodeScheduler:
    """Methods for a subclass of vLLM's Scheduler or AsyncScheduler, which is their attribute `vllm`."""

    vllm: Any

    def begin(self: Any, vllm: SimpleNamespace) -> None:
        """Set up the state of the fast path, once, with `_parts_of_vllm`."""
        self._unpaused, self._running_status = vllm.PauseState.UNPAUSED, vllm.RequestStatus.RUNNING
        self._cached_data, self._output = vllm.CachedRequestData, vllm.SchedulerOutput
        self._check_stop, self._remove_all = vllm.check_stop, vllm.remove_all
        self._core_output, self._core_outputs = vllm.EngineCoreOutput, vllm.EngineCoreOutputs
        self._ahead = 1 if isinstance(self, vllm.AsyncScheduler) else 0
        groups = self.kv_cache_config.kv_cache_groups
        self._num_groups, self._caches = len(groups), self.kv_cache_manager.enable_caching
        self._block = groups[0].kv_cache_spec.block_size
        if len(groups) > 1 or type(groups[0].kv_cache_spec) is not vllm.FullAttentionSpec:
            self._block = 1  # sliding windows also free blocks: vLLM must handle every token
        self._full_updates = 0
        """Outputs in flight that vLLM's own code must process, since a sequence in them was preempted."""
        self._refused_at: int | None = None
        """Free blocks when the first waiting sequence did not fit."""
        self._finished_logprobs: dict[str, list[float]] = {}
        self.short_steps = self.full_steps = 0

    def take_logprobs(self: Any, request_id: str) -> np.ndarray:
        """Return the log-probabilities of a finished request's tokens, float32 [R], by the caller's request id."""
        return np.asarray(self._finished_logprobs.pop(request_id), np.float32)

    def add_request(self: Any, request: Any) -> None:
        """Replace vLLM's `add_request`: store on the request what the fast path checks in every step."""
        sampling = request.sampling_params
        request.rollout_stops = frozenset([sampling.eos_token_id, *(sampling.stop_token_ids or ())])
        request.rollout_tokens = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        if sampling.repetition_detection is not None:
            request.rollout_tokens = 0  # any token may end it
        request.rollout_logprobs = []
        self.vllm.add_request(self, request)

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace vLLM's `schedule`."""
        due = self._due()
        if due is not None:
            self.short_steps += 1
            return self._schedule_decodes(due)
        self.full_steps += 1
        if self._caches:
            self._cache_written_blocks()
        output = self.vllm.schedule(self, *args, **kwargs)
        if output.preempted_req_ids:
            self._full_updates = STEPS_IN_FLIGHT
        admitted = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        refused = not self._caches and not admitted and not output.preempted_req_ids and self.get_request_counts()[1]
        self._refused_at = self.kv_cache_manager.block_pool.get_num_free_blocks() if refused else None
        return output

    def _due(self: Any) -> list[Any] | None:
        """Return the requests that compute a token in this step; None if vLLM must decide."""
        running, free = self.running, self.kv_cache_manager.block_pool.get_num_free_blocks()
        if (
            not running
            or self._inflight_prefills
            or self.reset_preempted_req_ids
            or self._pause_state != self._unpaused
            or len(running) > self.max_num_scheduled_tokens
        ):
            return None
        is_refused = self._refused_at is not None and free <= self._refused_at  # waiting sequences do not fit
        if self.get_request_counts()[1] and len(running) < self.max_num_running_reqs and not is_refused:
            return None
        last, due = self.max_model_len - 1, []
        for request in running:
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            # Its last token is being computed; or the model has no position for another one.
            if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
                continue
            if computed < last:
                due.append(request)
        if free < len(due) * self._num_groups:
            needed = sum(request.num_computed_tokens % self._block == 0 for request in due) * self._num_groups
            if free < needed:
                return None
        return due

    def _cache_written_blocks(self: Any) -> None:
        """Add blocks filled by fast steps to the prefix cache, as vLLM's own steps would have done.

        Only vLLM's steps use the cache. A sequence that ends in a fast step therefore leaves its prompt there, but not
        its response, whose blocks are the first to be reused.
        """
        for request in self.running:
            request.update_block_hashes()
            self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)

    def _schedule_decodes(self: Any, due: list[Any]) -> Any:
        block, ahead = self._block, self._ahead
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        names = [request.request_id for request in due]
        computed = [request.num_computed_tokens for request in due]
        outputs = [position + 1 - request.num_prompt_tokens for request, position in zip(due, computed, strict=True)]
        blocks: list[Any] = [None] * len(due)
        for place in [place for place, position in enumerate(computed) if position % block == 0]:
            blocks[place] = self._next_block(due[place])
        sequence_number = self.sched_step_seq + bool(due)
        for request, position in zip(due, computed, strict=True):
            request.num_computed_tokens = position + 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += ahead
            request.last_sched_seq = sequence_number
        counts = dict.fromkeys(names, 1)
        all_token_ids = {}
        if not self.use_v2_model_runner:
            before = self.prev_step_scheduled_req_ids
            all_token_ids = {name: self.requests[name].all_token_ids.copy() for name in names if name not in before}
            before.clear()
            before.update(counts)
        output = self._output.make_empty()
        output.scheduled_cached_reqs = self._cached_data(
            req_ids=names, resumed_req_ids=set(), new_token_ids=[], all_token_ids=all_token_ids, new_block_ids=blocks,
            num_computed_tokens=computed, num_output_tokens=outputs,
        )
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = counts, len(names)
        output.num_common_prefix_blocks = [0] * self._num_groups
        output.finished_req_ids, output.preempted_req_ids = self.finished_req_ids, self.reset_preempted_req_ids
        output.new_block_ids_to_zero = self._get_new_block_ids_to_zero()
        if self.defer_block_free and names:
            self.sched_step_seq += 1
        self.finished_req_ids, self.reset_preempted_req_ids = set[str](), set[str]()
        output.is_short, output.due = True, due
        return output

    def _next_block(self: Any, request: Any) -> Any:
        """Return the ids of blocks that begin with a request's next token, per group of KV caches; None without any."""
        position, manager = request.num_computed_tokens, self.kv_cache_manager
        if self._block > 1:  # the checks of `allocate_slots` are already done
            found = manager.coordinator.allocate_new_blocks(request.request_id, position + 1, position + 1)
            return tuple([block.block_id for block in blocks] for blocks in found)
        allocated = manager.allocate_slots(request, 1, delay_cache_blocks=True)
        if allocated is None:
            raise RuntimeError(f"no KV cache block for {request.request_id}, although there were free ones")
        return allocated.get_block_ids(allow_none=True)

    def update_from_output(self: Any, scheduled: Any, computed: Any) -> Any:
        """Replace vLLM's `update_from_output`."""
        is_short = getattr(scheduled, "is_short", False)
        if not is_short or self._full_updates or computed.num_nans_in_logits or computed.kv_connector_output:
            self._full_updates = max(0, self._full_updates - 1)
            names = scheduled.num_scheduled_tokens
            requests = {name: self.requests[name] for name in names if name in self.requests}  # some may end
            return self._keep_unfinished(requests, self.vllm.update_from_output(self, scheduled, computed))
        if self.defer_block_free and scheduled.total_num_scheduled_tokens > 0:
            self.processed_step_seq += 1
            self._drain_deferred_frees()
        finished, stopped = self._append_tokens(scheduled, computed)
        if stopped:
            self.running = self._remove_all(self.running, stopped)
        return {0: self._core_outputs(outputs=finished)} if finished else {}

    def _append_tokens(self: Any, scheduled: Any, computed: Any) -> tuple[list[Any], set[Any]]:
        """Append each request's token; return outputs of finished requests, and these requests."""
        tokens, index, running, ahead = (
            computed.sampled_token_ids, computed.req_id_to_index, self._running_status, self._ahead
        )  # fmt: skip
        logprobs = None if computed.logprobs is None else computed.logprobs.logprobs[:, 0].tolist()
        finished, stopped = [], set()
        for request, name in zip(scheduled.due, scheduled.num_scheduled_tokens, strict=True):
            request.num_in_flight_tokens -= 1
            if request.status is not running:  # it may have been aborted
                assert request.is_finished(), f"{name} is {request.status.name} in a step of running sequences"
                continue
            row, own = index[name], request._output_token_ids
            token = tokens[row][0]
            own.append(token)
            request._all_token_ids.append(token)
            request.num_output_placeholders -= ahead
            if logprobs is not None:
                request.rollout_logprobs.append(logprobs[row])
            may_end = len(own) >= request.rollout_tokens or token in request.rollout_stops
            if may_end and self._check_stop(request, self.max_model_len):
                reason = request.get_finished_reason()
                self._free_request(request)
                self._keep_logprobs(request)
                stopped.add(request)
                finished.append(
                    self._core_output(
                        request_id=name, new_token_ids=own, finish_reason=reason, stop_reason=request.stop_reason
                    )
                )
        return finished, stopped

    def _keep_unfinished(self: Any, requests: dict[str, Any], found: Any) -> Any:
        """Return the outputs of vLLM's own code without those of unfinished requests."""
        for outputs in found.values():
            ended = []
            for output in outputs.outputs:
                request = requests[output.request_id]
                if output.new_logprobs is not None:
                    request.rollout_logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
                    output.new_logprobs = None
                if output.finish_reason is not None:
                    output.new_token_ids = request._output_token_ids
                    self._keep_logprobs(request)
                    ended.append(output)
            outputs.outputs = ended
        return found

    def _keep_logprobs(self: Any, request: Any) -> None:
        """Keep a finished request's log-probabilities until its caller takes them."""
        if request.rollout_logprobs:
            given = request.request_id.partition("-")[0]  # vLLM appends a number to the caller's id
            self._finished_logprobs[given] = request.rollout_logprobs
