"""Decode steps that cost the host little: a short path through vLLM's newer model runner for rollouts.

vLLM's runner prepares every step from nothing: which rows are in the batch, which graph fits it, what the sampling
parameters ask for. That takes longer than the kernels of a small model. In a rollout most steps compute one more token
of the very sequences of the step before, for which all of that is as it was. `install` gives the runner of an engine a
subclass that keeps it as long as the batch stays the same and launches vLLM's kernels with it, in vLLM's order: tokens
and log-probabilities are those of vLLM, bit for bit. Where sequences only leave, it takes the others out of what it has
kept. Every other step is left to vLLM's own code.

Steps are recognised by the mark that the scheduler's short path (vllm_scheduler) puts on them. For a version in which
nobody has compared the tokens, and for an engine that does more than a rollout needs, `install` says why not and leaves
it as it is.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hybrid_gkd.models import vllm_compat

TRIED = ((0, 26),)
"""Versions of vLLM whose tokens were compared, by tests/same_tokens.py on a GPU."""
NEWER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
"""By name, because an engine with the older runner need not import this one's kernels."""


def install(engine: Any) -> str | None:
    """Give the engine (vLLM's LLMEngine, in this process) the short path; None, or why it was left as it is."""
    if reason := vllm_compat.untried(TRIED):
        return reason
    try:
        runner = model_runner(engine)
        if (name := f"{type(runner).__module__}.{type(runner).__name__}") != NEWER:
            return f"the model runner is {name}"
        vllm = _parts_of_vllm()
        unusual = _unusual(runner, vllm)
    except (ImportError, AttributeError) as error:
        return f"this vLLM is built differently: {error}"
    if unusual:
        return f"the engine uses {', '.join(unusual)}"
    runner.__class__ = vllm_compat.with_methods(type(runner), DecodeSteps)
    runner.begin(vllm)
    return None


def model_runner(engine: Any) -> Any:
    """The model runner of an engine whose worker is in this process."""
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def _parts_of_vllm() -> SimpleNamespace:
    """What the short path takes from vLLM. Raises ImportError."""
    from vllm import envs
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsTensors, ModelRunnerOutput
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.worker.gpu.async_utils import stream
    from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
    from vllm.v1.worker.gpu.model_runner import ExecuteModelState
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    return SimpleNamespace(
        FULL=CUDAGraphMode.FULL, AsyncModelRunnerOutput=AsyncModelRunnerOutput, LogprobsTensors=LogprobsTensors,
        ModelRunnerOutput=ModelRunnerOutput, apply_top_k_top_p=apply_top_k_top_p, stream=stream,
        NO_OP_KV_CONNECTOR=NO_OP_KV_CONNECTOR, ExecuteModelState=ExecuteModelState, DefaultModelState=DefaultModelState,
        apply_temperature=apply_temperature, gumbel_sample=gumbel_sample, compute_topk_scores=compute_topk_scores,
        Sampler=Sampler, envs=envs,
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
        "padding that experts skip": vllm.envs.VLLM_MOE_SKIP_PADDING,
        "no full CUDA graphs": not getattr(runner.cudagraph_manager, "graphs", None),
    }
    return [name for name, used in features.items() if used]


class DecodeSteps:
    """Methods for a subclass of vLLM's newer GPUModelRunner, which is their attribute `vllm`."""

    def begin(self: Any, vllm: SimpleNamespace) -> None:
        """Set up the state of the short path, once, with `_parts_of_vllm`."""
        from hybrid_gkd.rollout.vllm_runner_triton import prepare_decodes

        self._parts, self._output, self._prepare_decodes = vllm, _output_class(vllm), prepare_decodes
        self._kept: SimpleNamespace | None = None
        """What stays as it is while the batch does, see `_keep`; None where the next step is vLLM's."""
        self.short_steps = self.full_steps = 0

    @torch.inference_mode()
    def execute_model(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `execute_model`."""
        decodes, kept, self._kept = _only_decodes(scheduled), self._kept, None
        if decodes and kept is not None:
            names = list(scheduled.num_scheduled_tokens)
            stays = names == kept.batch.req_ids
            if not stays:
                kept = self._part_of(kept, names)
            if kept is not None:
                self.short_steps += 1
                self._decode(kept, scheduled, moved=not stays)
                self._kept = kept
                return None
        self.full_steps += 1
        found = self.vllm.execute_model(self, scheduled, *args, **kwargs)
        if decodes and self.execute_model_state is not None:
            self._kept = self._keep(self.execute_model_state.input_batch)
        return found

    @torch.inference_mode()
    def sample_tokens(self: Any, grammar: Any) -> Any:
        """vLLM's `sample_tokens`."""
        kept, state = self._kept, self.execute_model_state
        if kept is None or grammar is not None or state is None:
            return self.vllm.sample_tokens(self, grammar)
        self.execute_model_state = None
        batch = kept.batch
        # One token a row: what vLLM reads through `logits_indices` are the first rows as they are.
        logits = self.model.compute_logits(state.hidden_states[: batch.num_reqs])
        sampled, logprobs = self._sample(kept.asked, batch, logits)
        output = self._parts.ModelRunnerOutput(
            req_ids=batch.req_ids, req_id_to_index=kept.places, sampled_token_ids=None, prompt_logprobs_dict={}
        )
        found = self._output(output, sampled, logprobs, self.main_stream, self.output_copy_stream)
        self.postprocess_sampled(
            batch.idx_mapping, sampled, kept.num_sampled, kept.num_rejected, batch.query_start_loc
        )
        return found

    def post_kv_cache_wake_up(self: Any) -> None:
        """vLLM's `post_kv_cache_wake_up`: the block tables on the GPU are gone."""
        self._kept = None
        self.vllm.post_kv_cache_wake_up(self)

    def _keep(self: Any, batch: Any) -> SimpleNamespace | None:
        """What the steps after one that vLLM has prepared can use; None unless a graph decodes one token a row."""
        graph = self._graph(batch.num_reqs)
        if graph is None or batch.num_tokens != batch.num_reqs or batch.is_prefilling_np.any():
            return None
        ones, zeros = batch.seq_lens.new_ones(batch.num_reqs), batch.seq_lens.new_zeros(batch.num_reqs)
        return self._kept_of(batch, graph, self._asked(batch), num_sampled=ones, num_rejected=zeros)

    def _graph(self: Any, count: int) -> Any:
        """The descriptor of the graph in which so many rows decode a token each; None where there is none."""
        graph = self.cudagraph_manager.dispatch(count, count, 1, num_active_loras=0)
        return graph if graph.cg_mode == self._parts.FULL else None

    def _kept_of(self: Any, batch: Any, graph: Any, asked: SimpleNamespace, **kwargs: Any) -> SimpleNamespace:
        tables = self.block_tables
        return SimpleNamespace(
            batch=batch, graph=graph, asked=asked, places={name: place for place, name in enumerate(batch.req_ids)},
            block_tables=tuple(table[: batch.num_reqs_after_padding] for table in tables.input_block_tables),
            slot_mappings=tables.slot_mappings[:, : batch.num_tokens_after_padding], **kwargs,
        )

    def _asked(self: Any, batch: Any) -> SimpleNamespace:
        """What the sequences of a batch want of the sampler."""
        sampler, rows = self.sampler, batch.idx_mapping_np
        sampling, processed = sampler.sampling_states, sampler.logprobs_mode.startswith("processed_")
        top_k, top_p = sampling.get_top_k_top_p(batch.expanded_idx_mapping, rows)
        with_logprobs, cuts = sampler.returns_logprobs(rows), top_k is not None or top_p is not None
        flashinfer = (
            sampler.use_flashinfer and cuts and not (with_logprobs and processed)
            and not sampling.any_greedy(rows) and not sampling.any_explicit_seed(rows)
        )  # fmt: skip
        rarely_used = (
            sampler.logit_bias_state.use_logit_bias[rows].any() or sampler.penalties_state.use_penalty[rows].any()
            or sampler.bad_words_state.num_bad_words.np[rows].any() or sampling.min_p.np[rows].any()
            or sampler.logprob_token_ids_state.max_num_token_ids(rows) > 0
        )  # fmt: skip
        temperature, num_logprobs = sampling.temperature.np[rows], sampling.num_logprobs[rows]
        scaled = (temperature != 0.0) & (temperature != 1.0)
        left_to_vllm = bool(flashinfer or rarely_used)
        return SimpleNamespace(
            left_to_vllm=left_to_vllm, top_k=top_k, top_p=top_p, scales=scaled.any(), processed=processed,
            num_logprobs=max(0, int(num_logprobs.max())) if with_logprobs else None,
            of_logits=sampler.logprobs_mode.endswith("_logits"),
            of_every_part=not (left_to_vllm or cuts) and scaled.all() == scaled.any()
            and num_logprobs.min() == num_logprobs.max(),
        )

    def _part_of(self: Any, kept: SimpleNamespace, names: list[str]) -> SimpleNamespace | None:
        """The same for some of its sequences, of which the others have left; None where one is not among them."""
        places = [kept.places.get(name) for name in names]
        graph = None if None in places else self._graph(len(names))
        if graph is None:
            return None
        count, before, buffers = len(names), kept.batch, self.input_buffers
        rows, num_rows, num_tokens = before.idx_mapping_np[places], graph.num_reqs or len(names), graph.num_tokens
        idx_mapping = torch.from_numpy(rows).pin_memory().to(self.device, non_blocking=True)
        batch = replace(
            before, req_ids=names, num_reqs=count, num_reqs_after_padding=num_rows, num_tokens=count,
            num_tokens_after_padding=num_tokens, idx_mapping=idx_mapping, idx_mapping_np=rows,
            expanded_idx_mapping=idx_mapping, expanded_local_pos=before.expanded_local_pos[:count],
            num_scheduled_tokens=before.num_scheduled_tokens[:count],
            query_start_loc=buffers.query_start_loc[: num_rows + 1],
            query_start_loc_np=np.minimum(np.arange(num_rows + 1, dtype=np.int32), count),
            seq_lens=buffers.seq_lens[:num_rows], num_computed_tokens_np=before.num_computed_tokens_np[places],
            prefill_len_np=before.prefill_len_np[places],
            num_computed_prefill_tokens_np=before.num_computed_prefill_tokens_np[places],
            is_prefilling_np=before.is_prefilling_np[:count], input_ids=buffers.input_ids[:num_tokens],
            positions=buffers.positions[:num_tokens], is_padding=buffers.is_padding[:num_tokens],
            logits_indices=before.logits_indices[:count], cu_num_logits=before.cu_num_logits[: count + 1],
            cu_num_logits_np=before.cu_num_logits_np[: count + 1],
        )
        asked = kept.asked if kept.asked.of_every_part else self._asked(batch)
        ones, zeros = kept.num_sampled[:count], kept.num_rejected[:count]
        return self._kept_of(batch, graph, asked, num_sampled=ones, num_rejected=zeros)

    def _decode(self: Any, kept: SimpleNamespace, scheduled: Any, *, moved: bool) -> None:
        """What `execute_model` does for one more token of every row; `moved` where a row is another sequence's now."""
        batch, states, buffers, tables = kept.batch, self.req_states, self.input_buffers, self.block_tables
        requests, rows = scheduled.scheduled_cached_reqs, batch.idx_mapping_np
        if scheduled.finished_req_ids:
            self.finish_requests(scheduled)
        lengths = np.zeros(batch.num_reqs_after_padding, np.int32)
        lengths[: batch.num_reqs] = requests.num_computed_tokens
        states.num_computed_tokens_np[rows] = lengths[: batch.num_reqs]
        grown = [place for place, blocks in enumerate(requests.new_block_ids) if blocks is not None]
        for place in grown:
            tables.append_block_ids(int(rows[place]), requests.new_block_ids[place], overwrite=False)
        if grown:
            tables.apply_staged_writes()
        changed = grown or moved  # otherwise the graph's block tables are those of the step before
        self._prepare_decodes(
            batch.idx_mapping, states, buffers, tables, copied_rows=batch.num_reqs_after_padding if changed else 0
        )
        lengths[: batch.num_reqs] += 1
        batch.seq_lens_cpu_upper_bound = torch.from_numpy(lengths)
        # The graph does not see the metadata itself, but tensors at fixed places that some backends write with it.
        self.model_state.prepare_attn(
            batch, self._parts.FULL, kept.block_tables, kept.slot_mappings, self.attn_groups, self.kv_cache_config
        )
        hidden_states = self.cudagraph_manager.run_fullgraph(kept.graph)
        self.execute_model_state = self._parts.ExecuteModelState(batch, None, None, hidden_states, None, set())

    def _sample(self: Any, asked: SimpleNamespace, batch: Any, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What the sampler does: token of every row [N, 1] and vLLM's LogprobsTensors, None where nobody asked."""
        vllm, sampler, rows = self._parts, self.sampler, batch.expanded_idx_mapping
        if asked.left_to_vllm:
            found = sampler(logits, batch)
            return found.sampled_token_ids, found.logprobs_tensors
        sampling = sampler.sampling_states
        is_raw = asked.num_logprobs is not None and not asked.processed
        scaled = logits.clone() if is_raw else logits  # what follows is in place
        if asked.scales:
            vllm.apply_temperature(scaled, rows, sampling.temperature.gpu)
        scaled = vllm.apply_top_k_top_p(scaled, asked.top_k, asked.top_p)
        sampled = vllm.gumbel_sample(
            scaled, rows, sampling.temperature.gpu, sampling.seeds.gpu, batch.positions[: batch.num_reqs],
            apply_temperature=False, use_fp64=sampler.use_fp64_gumbel,
        )
        if asked.num_logprobs is None:
            return sampled.view(-1, 1), None
        source = logits if is_raw else scaled
        logprobs = vllm.compute_topk_scores(source, asked.num_logprobs, sampled, logits_mode=asked.of_logits)
        return sampled.view(-1, 1), logprobs


def _only_decodes(scheduled: Any) -> bool:
    """Whether a step computes one token of sequences that the runner knows, and nothing else."""
    return (
        getattr(scheduled, "is_short", False) and scheduled.total_num_scheduled_tokens > 0
        and not scheduled.preempted_req_ids and not scheduled.new_block_ids_to_zero
        and not scheduled.kv_cache_block_copies
    )  # fmt: skip


def _output_class(vllm: SimpleNamespace) -> type:
    """vLLM's AsyncOutput for one token a row, which needs no copy of how many there are."""

    class DecodeOutput(vllm.AsyncModelRunnerOutput):  # type: ignore[name-defined]
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
