"""Fast decode steps for rollouts in vLLM's newer model runner, with little work on the host.

vLLM's runner prepares every step from scratch: rows of the batch, matching graph, sampling parameters. This takes
longer than the kernels of a small model. Most steps of a rollout compute one more token of the same sequences, so that
all of this is unchanged. `install` replaces the class of an engine's runner by a subclass that reuses it while the
batch stays the same; if sequences only leave, the remaining ones are selected from it. Such a step consists of a copy
to the GPU (for new rows or blocks), three graphs, which prepare the batch, compute the model (vLLM's own) and sample
the tokens, and a copy back. The tokens are bitwise those of vLLM; log-probabilities, which are summed in another order,
are equal up to rounding in float32. All other steps are left to vLLM's own code.

Steps are recognised by the mark of the scheduler's fast path (fast_scheduler.py). For untested versions of vLLM, and
for engines with features beyond rollouts, `install` returns the reason and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hybrid_gkd.compat.vllm import versions as vllm_compat

TESTED_VERSIONS = ((0, 26),)
"""Versions of vLLM whose tokens were compared by tests/same_tokens.py on a GPU."""
NEWER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
"""Name of the class, since an engine with the older runner does not import this one's kernels."""


def install(engine: Any) -> str | None:
    """Install the fast path in an engine (vLLM's LLMEngine, in this process); return None, or the reason against it."""
    if reason := vllm_compat.untested_reason(TESTED_VERSIONS):
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
    runner.__class__ = vllm_compat.with_methods(type(runner), FastDecodeRunner)
    runner.begin(vllm)
    return None


def model_runner(engine: Any) -> Any:
    """Return the model runner of an engine whose worker is in this process."""
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def _parts_of_vllm() -> SimpleNamespace:
    """Return the parts of vLLM that the fast path uses. Raises ImportError."""
    from vllm import envs
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    return SimpleNamespace(
        FULL=CUDAGraphMode.FULL, FlashAttentionMetadataBuilder=FlashAttentionMetadataBuilder,
        AsyncModelRunnerOutput=AsyncModelRunnerOutput, LogprobsLists=LogprobsLists, ModelRunnerOutput=ModelRunnerOutput,
        apply_top_k_top_p=apply_top_k_top_p, UvaBufferPool=UvaBufferPool, InputBatch=InputBatch,
        NO_OP_KV_CONNECTOR=NO_OP_KV_CONNECTOR, DefaultModelState=DefaultModelState,
        apply_temperature=apply_temperature, Sampler=Sampler, envs=envs,
    )


def _unusual(runner: Any, vllm: SimpleNamespace) -> list[str]:
    """Return the names of used features that the fast path does not support."""
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
        "noise in float64": bool(getattr(runner.sampler, "use_fp64_gumbel", False)),
        "a KV connector": runner.kv_connector is not vllm.NO_OP_KV_CONNECTOR,
        "expert load balancing": runner.parallel_config.enable_eplb,
        "reference windows": runner.model_config.rswa_window is not None,
        "padding that experts skip": vllm.envs.VLLM_MOE_SKIP_PADDING,
        "no full CUDA graphs": not getattr(runner.cudagraph_manager, "graphs", None),
    }
    return [name for name, used in features.items() if used]


class FastDecodeRunner:
    """Methods for a subclass of vLLM's newer GPUModelRunner, which is their attribute `vllm`."""

    def begin(self: Any, vllm: SimpleNamespace) -> None:
        """Set up the state of the fast path, once, with `_parts_of_vllm`."""
        from hybrid_gkd.compat.vllm import runner_triton

        self._parts, self._kernels, self._output = vllm, runner_triton, _output_class(vllm)
        self._most_rows = len(self.input_buffers.seq_lens)
        self._batch = np.full(runner_triton.HEADER + 2 * self._most_rows, -1, np.int32)
        """Batch data for the kernels, uploaded through a pool of as many buffers as steps in flight."""
        self._uploads = vllm.UvaBufferPool(len(self._batch), torch.int32)
        self._batch_on_gpu = torch.full((len(self._batch),), -1, dtype=torch.int32, device=self.device)
        states = len(self.req_states.num_computed_tokens_np)
        self._temperatures = torch.zeros(states, dtype=torch.float32, device=self.device)
        self._seeds = torch.zeros(states, dtype=torch.int64, device=self.device)
        self._drawn = torch.zeros(2 * self._most_rows, dtype=torch.int32, device=self.device)
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        self._results: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        """Unused buffers for the tokens of a step, and their events."""
        self._dummies: dict[Any, Any] = {}
        self._capturing = torch.cuda.Stream(self.device)
        self._preparations: dict[tuple[Any, bool], torch.cuda.CUDAGraph] = {}
        self._preparation_pool = torch.cuda.graph_pool_handle()
        builders = [group.get_metadata_builder(0) for groups in self.attn_groups for group in groups]
        self._captures_preparation = all(type(each) is vllm.FlashAttentionMetadataBuilder for each in builders)
        self._captures_sampling = self.parallel_config.tensor_parallel_size == 1
        self.forget_sampling()
        tables = self.block_tables
        self._block = tables.block_sizes[0] if tables.block_sizes == tables.kernel_block_sizes[:1] else None
        """Tokens of a block if ids of new blocks can be uploaded with the batch, else None."""
        self._kept: SimpleNamespace | None = None
        """State reused while the batch is unchanged, see `_keep`; None if the next step is vLLM's."""
        self.short_steps = self.full_steps = 0

    @torch.inference_mode()
    def execute_model(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace vLLM's `execute_model`."""
        decodes, kept, self._kept = _only_decodes(scheduled), self._kept, None
        if decodes and kept is not None:
            names = list(scheduled.num_scheduled_tokens)
            stays = names == kept.names
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
        """Replace vLLM's `sample_tokens`."""
        kept = self._kept
        if kept is None or kept.hidden_states is None:
            return self.vllm.sample_tokens(self, grammar)
        hidden_states, kept.hidden_states = kept.hidden_states, None
        rows = self._sample(kept, hidden_states)
        output = self._parts.ModelRunnerOutput(
            req_ids=kept.names, req_id_to_index=kept.places, sampled_token_ids=None, prompt_logprobs_dict={}
        )
        return self._output(output, self._drawn, rows, kept.asked.logprobs, self._results)

    def post_kv_cache_wake_up(self: Any) -> None:
        """Replace vLLM's `post_kv_cache_wake_up`: drop the reused state, since the block tables on the GPU are gone."""
        self._kept = None
        self.vllm.post_kv_cache_wake_up(self)

    def forget_sampling(self: Any) -> None:
        """Free the memory of logits, which the sampling graphs hold."""
        self._samplers: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        self._sampling_pool = torch.cuda.graph_pool_handle()

    def _keep(self: Any, batch: Any) -> SimpleNamespace | None:
        """Return the state that steps after one of vLLM can reuse; None unless a graph decodes one token per row."""
        graph, asked = self._graph(batch.num_reqs), self._asked(batch.idx_mapping_np, batch.idx_mapping)
        if graph is None or asked is None or batch.num_tokens != batch.num_reqs or batch.is_prefilling_np.any():
            return None
        self._temperatures.copy_(self.sampler.sampling_states.temperature.gpu, non_blocking=True)
        self._seeds.copy_(self.sampler.sampling_states.seeds.gpu, non_blocking=True)
        return _kept_of(list(batch.req_ids), batch.idx_mapping_np, graph, asked)

    def _graph(self: Any, count: int) -> Any:
        """Return the descriptor of the graph in which `count` rows decode a token each; None if there is none."""
        graph = self.cudagraph_manager.dispatch(count, count, 1, num_active_loras=0)
        return graph if graph.cg_mode == self._parts.FULL else None

    def _asked(self: Any, rows: np.ndarray, rows_on_gpu: torch.Tensor) -> SimpleNamespace | None:
        """Return the sampling settings of sequences at `rows` of the state; None if `_sample` does not support them."""
        sampler, sampling = self.sampler, self.sampler.sampling_states
        top_k, top_p = sampling.get_top_k_top_p(rows_on_gpu, rows)
        cuts, num_logprobs = top_k is not None or top_p is not None, sampling.num_logprobs[rows]
        logprobs = bool(sampler.returns_logprobs(rows))
        flashinfer = (
            sampler.use_flashinfer and cuts and not logprobs
            and not sampling.any_greedy(rows) and not sampling.any_explicit_seed(rows)
        )  # fmt: skip
        if (
            flashinfer or num_logprobs.max() > 0 or (logprobs and sampler.logprobs_mode != "processed_logprobs")
            or sampler.logit_bias_state.use_logit_bias[rows].any() or sampler.penalties_state.use_penalty[rows].any()
            or sampler.bad_words_state.num_bad_words.np[rows].any() or sampling.min_p.np[rows].any()
            or sampler.logprob_token_ids_state.max_num_token_ids(rows) > 0
        ):  # fmt: skip
            return None
        temperature = sampling.temperature.np[rows]
        scaled = (temperature != 0.0) & (temperature != 1.0)
        of_every_part = not cuts and scaled.all() == scaled.any() and num_logprobs.min() == num_logprobs.max()
        return SimpleNamespace(
            top_k=top_k, top_p=top_p, cuts=cuts, scales=bool(scaled.any()), logprobs=logprobs,
            of_every_part=bool(of_every_part),
        )  # fmt: skip

    def _part_of(self: Any, kept: SimpleNamespace, names: list[str]) -> SimpleNamespace | None:
        """Return the reused state restricted to the remaining sequences; None if a sequence is new."""
        places = [kept.places.get(name) for name in names]
        graph = None if None in places else self._graph(len(names))
        if graph is None:
            return None
        rows, asked = kept.rows[places], kept.asked
        if not asked.of_every_part:
            asked = self._asked(rows, torch.from_numpy(rows).pin_memory().to(self.device, non_blocking=True))
        return _kept_of(names, rows, graph, asked)

    def _decode(self: Any, kept: SimpleNamespace, scheduled: Any, *, moved: bool) -> None:
        """Do the work of `execute_model` for one more token of every row; `moved`: a row's sequence has changed."""
        requests, count = scheduled.scheduled_cached_reqs, len(kept.names)
        if scheduled.finished_req_ids:
            self.finish_requests(scheduled)
        lengths = np.zeros(kept.graph.num_reqs or min(kept.graph.num_tokens, self._most_rows), np.int32)
        lengths[:count] = requests.num_computed_tokens
        self.req_states.num_computed_tokens_np[kept.rows] = lengths[:count]
        grown = [place for place, blocks in enumerate(requests.new_block_ids) if blocks is not None]
        with_batch = self._block is not None and not (lengths[grown] % self._block).any()
        if grown and not with_batch:
            for place in grown:
                self.block_tables.append_block_ids(
                    int(kept.rows[place]), requests.new_block_ids[place], overwrite=False
                )
            self.block_tables.apply_staged_writes()
        if grown or moved or not kept.is_on_gpu:
            self._upload(kept, {place: requests.new_block_ids[place][0] for place in grown} if with_batch else {})
        self._prepare(kept.graph, lengths, moved=moved)
        kept.hidden_states = self.cudagraph_manager.run_fullgraph(kept.graph)

    def _upload(self: Any, kept: SimpleNamespace, new_blocks: dict[int, list[int]]) -> None:
        """Upload the batch, and the ids of blocks that begin with this token."""
        batch, first, count = self._batch, self._kernels.HEADER, len(kept.names)
        given = batch[first + self._most_rows :]
        given[:count] = -1
        batch[0], batch[first : first + count] = count, kept.rows
        if new_blocks:
            places = list(new_blocks)
            given[places] = [block for (block,) in new_blocks.values()]
            self.block_tables.num_blocks.np[0, kept.rows[places]] += 1
        self._uploads.copy_to_gpu(batch, out=self._batch_on_gpu)
        kept.is_on_gpu = True

    def _prepare(self: Any, graph: Any, lengths: np.ndarray, *, moved: bool) -> None:
        """Write the inputs of the model's graph, by a captured graph if possible."""
        captured = self._preparations.get((graph, moved))
        if captured is not None:
            captured.replay()
            return
        if graph not in self._dummies:
            self._dummies[graph] = self._dummy(len(lengths), graph.num_tokens)
        batch = self._dummies[graph]
        batch.seq_lens_cpu_upper_bound = torch.from_numpy(lengths + 1)
        self._launch_preparation(batch, moved=moved)
        if self._captures_preparation:
            captured = self._captured(self._preparation_pool, lambda: self._launch_preparation(batch, moved=moved))
            self._preparations[graph, moved] = captured

    def _dummy(self: Any, rows: int, num_tokens: int) -> Any:
        """Return a batch of vLLM with one token per row, followed by padding."""
        batch = self._parts.InputBatch.make_dummy(rows, num_tokens, self.input_buffers)
        batch.num_scheduled_tokens = np.ones(rows, np.int32)
        batch.query_start_loc_np = np.arange(rows + 1, dtype=np.int32)
        return batch

    def _launch_preparation(self: Any, batch: Any, *, moved: bool) -> None:
        rows, tables = batch.num_reqs_after_padding, self.block_tables
        self._kernels.prepare_decodes(
            self._batch_on_gpu, self.req_states, self.input_buffers, tables, copied_rows=rows if moved else 0
        )
        # The graph does not see the metadata itself, but tensors at fixed places that some backends write with it.
        self.model_state.prepare_attn(
            batch, self._parts.FULL, tuple(table[:rows] for table in tables.input_block_tables),
            tables.slot_mappings[:, : batch.num_tokens_after_padding], self.attn_groups, self.kv_cache_config,
            for_capture=self._captures_preparation,
        )  # fmt: skip

    def _sample(self: Any, kept: SimpleNamespace, hidden_states: torch.Tensor) -> int:
        """Sample a token of every sequence and append it; return the number of rows of `_drawn`."""
        asked, count = kept.asked, len(kept.names)
        if asked.cuts or not self._captures_sampling:
            self._launch_sampling(asked, hidden_states[:count])
            return count
        rows = min(len(hidden_states), self._most_rows)
        captured = self._samplers.get((rows, asked.scales, asked.logprobs))
        if captured is not None:
            captured.replay()
            return rows
        hidden_states = hidden_states[:rows]  # output of the model's graph, at the same address in every step
        self._launch_sampling(asked, hidden_states)
        captured = self._captured(self._sampling_pool, lambda: self._launch_sampling(asked, hidden_states))
        self._samplers[rows, asked.scales, asked.logprobs] = captured
        return rows

    def _launch_sampling(self: Any, asked: SimpleNamespace, hidden_states: torch.Tensor) -> None:
        # One token per row: `logits_indices` of vLLM are the first rows.
        vllm, logits = self._parts, self.model.compute_logits(hidden_states)
        if asked.cuts:
            if asked.scales:
                rows = self._batch_on_gpu[self._kernels.HEADER :][: len(logits)]
                vllm.apply_temperature(logits, rows, self._temperatures)
            logits = vllm.apply_top_k_top_p(logits, asked.top_k, asked.top_p)
        if self._scratch is None:
            size = self._most_rows * -(-logits.shape[1] // self._kernels.PART)
            self._scratch = logits.new_empty(3 * size, dtype=torch.float32), logits.new_empty(size, dtype=torch.int32)
        self._kernels.sample_decodes(
            logits, self._batch_on_gpu, self.input_buffers.positions, self.req_states, self._temperatures, self._seeds,
            self._scratch, self._drawn, scales=asked.scales and not asked.cuts, logprobs=asked.logprobs,
        )  # fmt: skip

    def _captured(self: Any, pool: Any, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture the GPU work of `launch`, which has run before, as a graph with its memory in `pool`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capturing):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph


def _kept_of(names: list[str], rows: np.ndarray, graph: Any, asked: SimpleNamespace) -> SimpleNamespace:
    """Return the reused state: sequences and their rows of the state, the model's graph, and sampling settings."""
    return SimpleNamespace(
        names=names, places={name: place for place, name in enumerate(names)}, rows=rows, graph=graph, asked=asked,
        is_on_gpu=False, hidden_states=None,
    )


def _only_decodes(scheduled: Any) -> bool:
    """Return whether a step only computes one token each of sequences that the runner knows."""
    return (
        getattr(scheduled, "is_short", False) and scheduled.total_num_scheduled_tokens > 0
        and not scheduled.preempted_req_ids and not scheduled.new_block_ids_to_zero
        and not scheduled.kv_cache_block_copies
    )  # fmt: skip


def _output_class(vllm: SimpleNamespace) -> type:
    """Return vLLM's AsyncOutput for one token per row, from one buffer on the GPU."""

    class DecodeOutput(vllm.AsyncModelRunnerOutput):  # type: ignore[name-defined]
        def __init__(self, output: Any, drawn: torch.Tensor, rows: int, logprobs: bool, results: list[Any]):
            self.output, self.rows, self.logprobs, self.results = output, rows, logprobs, results
            if not results:
                on_host = torch.empty_like(drawn, device="cpu", pin_memory=True)
                results.append((on_host, torch.cuda.Event(blocking=True)))
            self.result, self.event = results.pop()
            size = 2 * rows if logprobs else rows
            self.result[:size].copy_(drawn[:size], non_blocking=True)  # before the next step samples
            self.event.record()

        def get_output(self) -> Any:
            self.event.synchronize()
            count, numbers = len(self.output.req_ids), self.result.numpy()
            tokens, logprobs = numbers[:count, None].copy(), numbers[self.rows :][:count, None].copy()
            self.results.append((self.result, self.event))
            self.output.sampled_token_ids = tokens.tolist()
            if self.logprobs:
                ranks = np.zeros(count, np.int64)  # unused in rollouts
                self.output.logprobs = vllm.LogprobsLists(tokens, logprobs.view(np.float32), ranks)
            return self.output

    return DecodeOutput
