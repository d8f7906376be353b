"""Decode steps that cost the host little: a short path through vLLM's newer model runner for rollouts.

vLLM's runner prepares every step from nothing: which rows are in the batch, which graph fits it, what the sampling
parameters ask for. That takes longer than the kernels of a small model. In a rollout most steps compute one more token
of the very sequences of the step before, for which all of that is as it was. `install` gives the runner of an engine a
subclass that keeps it as long as the batch stays the same and launches vLLM's kernels with it, in vLLM's order: tokens
and log-probabilities are those of vLLM, bit for bit. Every other step is left to vLLM's own code.

Steps are recognised by the mark that the scheduler's short path (vllm_scheduler) puts on them. For a version in which
nobody has compared the tokens, and for an engine that does more than a rollout needs, `install` says why not and leaves
it as it is.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hybrid_gkd.models.vllm_compat import vllm_version

TRIED = ((0, 26),)
"""Versions of vLLM whose tokens were compared, by tests/same_tokens.py on a GPU."""


def install(engine: Any) -> str | None:
    """Give the engine (vLLM's LLMEngine, in this process) the short path; None, or why it was left as it is."""
    version = str(vllm_version())
    if tuple(map(int, re.findall(r"\d+", version)[:2])) not in TRIED:
        return f"this path was not tried with vLLM {version}"
    try:
        vllm = _parts_of_vllm()
        runner = model_runner(engine)
        if type(runner) is not vllm.GPUModelRunner:
            return f"the model runner is {type(runner).__module__}.{type(runner).__name__}"
        unusual = _unusual(runner, vllm)
    except (ImportError, AttributeError) as error:
        return f"this vLLM is built differently: {error}"
    if unusual:
        return f"the engine uses {', '.join(unusual)}"
    runner.__class__ = _with_decode_steps(vllm.GPUModelRunner)
    runner.begin(vllm)
    return None


def model_runner(engine: Any) -> Any:
    """The model runner of an engine whose worker is in this process."""
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def _parts_of_vllm() -> SimpleNamespace:
    """What the short path takes from vLLM. Raises ImportError."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsTensors, ModelRunnerOutput
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.worker.gpu.async_utils import stream
    from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens
    from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    return SimpleNamespace(
        FULL=CUDAGraphMode.FULL, AsyncModelRunnerOutput=AsyncModelRunnerOutput, LogprobsTensors=LogprobsTensors,
        ModelRunnerOutput=ModelRunnerOutput, apply_top_k_top_p=apply_top_k_top_p, stream=stream,
        combine_tokens=combine_sampled_and_draft_tokens, prepare_positions=prepare_pos_seq_lens,
        NO_OP_KV_CONNECTOR=NO_OP_KV_CONNECTOR, GPUModelRunner=GPUModelRunner, DefaultModelState=DefaultModelState,
        apply_temperature=apply_temperature, gumbel_sample=gumbel_sample, compute_topk_scores=compute_topk_scores,
        Sampler=Sampler,
    )


def _unusual(runner: Any, vllm: SimpleNamespace) -> list[str]:
    """What the short path does not do."""
    features = {
        "LoRA": runner.lora_config is not None,
        "pipeline parallelism": runner.use_pp,
        "data parallelism": runner.dp_size > 1,
        "context parallelism": runner.use_dcp or runner.pcp_manager is not None,
        "speculative decoding": runner.speculative_config is not None or runner.num_speculative_steps > 0,
        "several tokens a step": runner.decode_query_len != 1,
        "inputs that are no text": runner.supports_mm_inputs or runner.is_encoder_decoder,
        "pooling": runner.is_pooling_model,
        "a model with a state of its own": type(runner.model_state) is not vllm.DefaultModelState,
        "positions of several dimensions": getattr(runner.model_state, "rope_state", None) is not None,
        "a sampler of its own": type(runner.sampler) is not vllm.Sampler or runner.rejection_sampler is not None,
        "counts of NaNs": bool(getattr(runner.sampler, "compute_nans", False)),
        "a KV connector": runner.kv_connector is not vllm.NO_OP_KV_CONNECTOR,
        "expert load balancing": runner.parallel_config.enable_eplb,
        "reference windows": runner.model_config.rswa_window is not None,
        "no full CUDA graphs": not getattr(runner.cudagraph_manager, "graphs", None),
    }
    return [name for name, used in features.items() if used]


def _with_decode_steps(base: type) -> type:
    """A subclass with the methods of DecodeSteps. Python gives an object no class with a second base."""
    methods = {name: value for name, value in vars(DecodeSteps).items() if not name.startswith("__")}
    return type(f"Decode{base.__name__}", (base,), {**methods, "vllm": base})


class DecodeSteps:
    """Methods for a subclass of vLLM's newer GPUModelRunner, which is their attribute `vllm`."""

    def begin(self: Any, vllm: SimpleNamespace) -> None:
        """Set up the state of the short path, once, with `_parts_of_vllm`."""
        self._parts, self._output = vllm, _output_class(vllm)
        self._kept: SimpleNamespace | None = None
        """What stays as it is while the batch does, see `_keep`; None after a step that nothing can be kept of."""
        self.short_steps = self.full_steps = 0

    @torch.inference_mode()
    def execute_model(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `execute_model`."""
        kept = self._kept
        if kept is not None and _goes_on(kept, scheduled):
            self.short_steps += 1
            self._compute_hidden_states(kept, scheduled.scheduled_cached_reqs)
            self.execute_model_state = kept.state
            return None
        self.full_steps += 1
        self._kept = None
        found = self.vllm.execute_model(self, scheduled, *args, **kwargs)
        if getattr(scheduled, "is_short", False) and self.execute_model_state is not None:
            self._kept = self._keep(self.execute_model_state)
        return found

    @torch.inference_mode()
    def sample_tokens(self: Any, grammar: Any) -> Any:
        """vLLM's `sample_tokens`."""
        kept = self._kept
        if kept is None or grammar is not None or self.execute_model_state is None:
            return self.vllm.sample_tokens(self, grammar)
        self.execute_model_state = None
        sampled, logprobs = self._sample(kept, self.model.compute_logits(kept.hidden_states))
        output = self._parts.ModelRunnerOutput(
            req_ids=kept.req_ids, req_id_to_index=kept.req_id_to_index, sampled_token_ids=None, prompt_logprobs_dict={}
        )
        found = self._output(output, sampled, logprobs, self.main_stream, self.output_copy_stream)
        self.postprocess_sampled(
            kept.batch.idx_mapping, sampled, kept.num_sampled, kept.num_rejected, kept.batch.query_start_loc
        )
        return found

    def post_kv_cache_wake_up(self: Any) -> None:
        """vLLM's `post_kv_cache_wake_up`: the block tables on the GPU are gone."""
        self._kept = None
        self.vllm.post_kv_cache_wake_up(self)

    def _keep(self: Any, state: Any) -> SimpleNamespace | None:
        """Of a step that vLLM has prepared, what the next one can use; None unless every row decodes in one graph."""
        batch, sampler = state.input_batch, self.sampler
        count, rows = batch.num_reqs, batch.idx_mapping_np
        graph = self.cudagraph_manager.dispatch(count, batch.num_tokens, 1, num_active_loras=0)
        if graph.cg_mode != self._parts.FULL or batch.num_tokens != count or batch.is_prefilling_np.any():
            return None
        sampling, processed = sampler.sampling_states, sampler.logprobs_mode.startswith("processed_")
        temperature = sampling.temperature.np[rows]
        top_k, top_p = sampling.get_top_k_top_p(batch.expanded_idx_mapping, rows)
        with_logprobs = sampler.returns_logprobs(rows)
        flashinfer = (
            sampler.use_flashinfer and (top_k is not None or top_p is not None) and not (with_logprobs and processed)
            and not sampling.any_greedy(rows) and not sampling.any_explicit_seed(rows)
        )  # fmt: skip
        rarely_used = (
            sampler.logit_bias_state.use_logit_bias[rows].any() or sampler.penalties_state.use_penalty[rows].any()
            or sampler.bad_words_state.num_bad_words.np[rows].any() or sampling.min_p.np[rows].any()
            or sampler.logprob_token_ids_state.max_num_token_ids(rows) > 0
        )  # fmt: skip
        tables = self.block_tables
        return SimpleNamespace(
            batch=batch, count=count, rows=rows, graph=graph,
            req_ids=batch.req_ids, req_id_to_index={name: row for row, name in enumerate(batch.req_ids)},
            state=state._replace(attn_metadata=None, finished_req_ids=set()),
            block_tables=tuple(table[: batch.num_reqs_after_padding] for table in tables.input_block_tables),
            slot_mappings=tables.slot_mappings[:, : batch.num_tokens_after_padding],
            # One token a row: what vLLM reads through `logits_indices` are the first rows as they are.
            hidden_states=state.hidden_states[:count], positions=batch.positions[:count],
            num_sampled=batch.seq_lens.new_ones(count), num_rejected=batch.seq_lens.new_zeros(count),
            vllm_samples=bool(flashinfer or rarely_used), top_k=top_k, top_p=top_p,
            scales=not np.all((temperature == 0.0) | (temperature == 1.0)),
            num_logprobs=max(0, sampling.max_num_logprobs(rows)) if with_logprobs else None,
            processed=processed, of_logits=sampler.logprobs_mode.endswith("_logits"),
        )  # fmt: skip

    def _compute_hidden_states(self: Any, kept: SimpleNamespace, requests: Any) -> None:
        """What `execute_model` does for the next token of every row."""
        batch, states, buffers, tables = kept.batch, self.req_states, self.input_buffers, self.block_tables
        lengths = np.zeros(batch.num_reqs_after_padding, np.int32)
        lengths[: kept.count] = requests.num_computed_tokens
        states.num_computed_tokens_np[kept.rows] = lengths[: kept.count]
        lengths[: kept.count] += 1
        batch.seq_lens_cpu_upper_bound = torch.from_numpy(lengths)
        grown = [row for row, blocks in enumerate(requests.new_block_ids) if blocks is not None]
        for row in grown:
            tables.append_block_ids(int(kept.rows[row]), requests.new_block_ids[row], overwrite=False)
        if grown:
            tables.apply_staged_writes()
        self._parts.prepare_positions(
            batch.idx_mapping, batch.query_start_loc, states.num_computed_tokens.gpu, buffers.positions,
            buffers.seq_lens,
        )  # fmt: skip
        self._parts.combine_tokens(
            buffers.input_ids, batch.idx_mapping, states.last_sampled_tokens, batch.query_start_loc, batch.seq_lens,
            states.prefill_len.gpu, states.draft_tokens, batch.cu_num_logits, kept.count,
        )  # fmt: skip
        if grown:  # otherwise the graph's block tables are those of the step before
            tables.gather_block_tables(batch.idx_mapping, num_reqs_padded=batch.num_reqs_after_padding)
        tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, num_tokens_padded=batch.num_tokens_after_padding
        )
        # The graph does not see the metadata itself, but tensors at fixed places that some backends write with it.
        self.model_state.prepare_attn(
            batch, self._parts.FULL, kept.block_tables, kept.slot_mappings, self.attn_groups, self.kv_cache_config
        )
        self.cudagraph_manager.run_fullgraph(kept.graph)

    def _sample(self: Any, kept: SimpleNamespace, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What the sampler does: token of every row [N, 1] and vLLM's LogprobsTensors, None where nobody asked."""
        vllm, sampler, rows = self._parts, self.sampler, kept.batch.expanded_idx_mapping
        if kept.vllm_samples:
            found = sampler(logits, kept.batch)
            return found.sampled_token_ids, found.logprobs_tensors
        sampling = sampler.sampling_states
        scaled = logits if kept.processed or kept.num_logprobs is None else logits.clone()  # what follows is in place
        if kept.scales:
            vllm.apply_temperature(scaled, rows, sampling.temperature.gpu)
        scaled = vllm.apply_top_k_top_p(scaled, kept.top_k, kept.top_p)
        sampled = vllm.gumbel_sample(
            scaled, rows, sampling.temperature.gpu, sampling.seeds.gpu, kept.positions, apply_temperature=False,
            use_fp64=sampler.use_fp64_gumbel,
        )  # fmt: skip
        logprobs = None
        if kept.num_logprobs is not None:
            source = scaled if kept.processed else logits
            logprobs = vllm.compute_topk_scores(source, kept.num_logprobs, sampled, logits_mode=kept.of_logits)
        return sampled.view(-1, 1), logprobs


def _goes_on(kept: SimpleNamespace, scheduled: Any) -> bool:
    """Whether a step computes one more token of every row of the step before it, and nothing else."""
    return (
        getattr(scheduled, "is_short", False)
        and not scheduled.finished_req_ids and not scheduled.preempted_req_ids
        and not scheduled.new_block_ids_to_zero and not scheduled.kv_cache_block_copies
        and list(scheduled.num_scheduled_tokens) == kept.req_ids
    )  # fmt: skip


def _output_class(vllm: SimpleNamespace) -> type:
    """vLLM's AsyncOutput for one token a row, which needs no copy of how many there are."""

    class DecodeOutput(vllm.AsyncModelRunnerOutput):  # type: ignore[misc, name-defined]
        def __init__(self, output: Any, sampled: torch.Tensor, logprobs: Any, main: Any, copies: Any):
            self.output, self.logprobs = output, None
            self.on_gpu = sampled, logprobs  # their memory is not used again before the other stream has read them
            self.event = torch.cuda.Event(blocking=True)
            with vllm.stream(copies, main):
                copies.wait_stream(main)
                self.tokens = sampled.to("cpu", non_blocking=True)
                if logprobs is not None:
                    ids = logprobs.logprob_token_ids
                    self.logprobs = vllm.LogprobsTensors(
                        # Without further candidates they are the tokens.
                        self.tokens if ids.shape[1] == 1 else ids.to("cpu", non_blocking=True),
                        logprobs.logprobs.to("cpu", non_blocking=True),
                        logprobs.selected_token_ranks.to("cpu", non_blocking=True),
                        logprobs.cu_num_generated_tokens,
                    )
                self.event.record(copies)

        def get_output(self) -> Any:
            self.event.synchronize()
            self.output.sampled_token_ids = self.tokens.tolist()
            if self.logprobs is not None:
                self.output.logprobs = self.logprobs.tolists()
            return self.output

    return DecodeOutput
