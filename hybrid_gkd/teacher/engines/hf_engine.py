"""Scoring engine on transformers: a forward of packed readings; the head runs only on rows of scored tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_gkd.errors import ModelError, describe_error
from hybrid_gkd.losses.topk import TopLogprobs, top_logprobs
from hybrid_gkd.models.packed_attention import PACKED_ATTENTION, pack, packed_and_alone, to_device
from hybrid_gkd.teacher.engines.adapters import add_adapter, select_adapter
from hybrid_gkd.teacher.engines.base import Item, ScoringEngine, describe_model
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.types import TopK

log = logging.getLogger(__name__)

TOKENS_PER_FORWARD = 16384
WHOLE_MODEL_TOKENS = 2048
"""Tokens per forward of models whose head cannot be applied to selected rows."""


class HFScoringEngine(ScoringEngine):
    """Packs readings if the model's attention can be replaced; otherwise pads them, which is slower."""

    def __init__(self, options: EngineOptions):
        config, info = describe_model(options, "hf")
        super().__init__(info)
        self._running: Callable[[], list[tuple[Item, TopK]]] | None = None
        """Function that waits for the scores of the last forward."""
        self._packed = True
        try:
            self._model = _load(options, PACKED_ATTENTION)
            self._check_packing()
        except Exception as error:  # architectures raise various errors for an unknown attention implementation
            log.warning("%s; sequences are padded, which is slower", describe_error(error))
            self._packed, self._model = False, None
            # transformers' other implementations silently ignore the soft cap.
            capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
            self._model = _load(options, "eager" if capped else None)
        # The packed attention pads internally, except on a GPU in half precision.
        self._pads = not self._packed or self._model.device.type == "cpu" or self._model.dtype == torch.float32
        self._head: Any = self._model.get_output_embeddings() if self._head_is_separable() else None
        for name, folder in options.adapters:
            add_adapter(self._model, name, folder)
        self._adapter: str | None = None
        """Adapter of the last forward."""
        if options.adapters:
            select_adapter(self._model, None)

    @torch.inference_mode()
    def _check_packing(self) -> None:
        """Check packing. Raises ModelError: packed sequences attend to each other, or the model rejects packs."""
        def states(sequences: list[np.ndarray]) -> Tensor:
            found: Tensor = self._model.base_model(**self._batch(sequences))[0][0, -len(sequences[-1]) :]
            return found.float()

        longest = min(self.info.max_sequence_length, TOKENS_PER_FORWARD)
        config = self._model.config.to_dict()
        for _, alone, together in packed_and_alone(states, config, longest=longest, num_ids=self.info.num_embeddings):
            # If sequences attend to each other, the norm of the difference is of the order of the states' norm.
            if (together - alone).norm() > 0.1 * alone.norm():
                raise ModelError(f"{type(self._model).__name__} does not keep packed sequences apart")

    @torch.inference_mode()
    def _head_is_separable(self) -> bool:
        """Return whether head(body(x)) equals the model's logits; some models scale or cap them in between."""
        head = self._model.get_output_embeddings()
        if head is None or self._model.base_model is self._model:
            return False
        batch = self._batch([np.arange(4)])
        logits = head(self._model.base_model(**batch)[0].to(head.weight.device))
        expected = self._model(**batch).logits.to(logits.device)
        return torch.allclose(logits.float(), expected.float(), atol=1e-3, rtol=1e-3)

    def _batch(self, inputs: list[np.ndarray]) -> dict[str, Any]:
        """Return the arguments of the forward: one packed row, or one padded row per reading."""
        device = self._model.get_input_embeddings().weight.device
        if self._packed:
            return pack(inputs, device).model_kwargs()
        ids = np.zeros((len(inputs), max(map(len, inputs))), np.int64)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        return {"input_ids": to_device(ids, device), "attention_mask": to_device(mask, device), "use_cache": False}

    def sleep(self) -> None:
        self._device = self._model.device
        self._model.to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._model.to(self._device)

    def clear(self) -> list[Any]:
        self._running = None
        return super().clear()

    def _step(self) -> list[tuple[Item, TopK]]:
        """Start the next forward, then wait for the scores of the last one."""
        items, wait = self._take(), self._running
        self._running = self._start(items) if items else None
        return wait() if wait is not None else []

    def _take(self) -> list[Item]:
        """Take the readings of the next forward: at least one if any is queued, all of one `batch_key` and adapter.

        The token limit includes padding.
        """
        limit = TOKENS_PER_FORWARD if self._head is not None else WHOLE_MODEL_TOKENS
        items, others = list[Item](), list[Item]()  # others: with another adapter, for a later forward
        longest = total = 0
        while self._queue:
            if items and self._queue[0].adapter != items[0].adapter:
                others.append(self._queue.popleft())
                continue
            length = self._queue[0].num_tokens
            longest, total = max(longest, length), total + length
            size = longest * (len(items) + 1) if self._pads else total
            if items and (size > limit or self._queue[0].batch_key != items[0].batch_key):
                break
            items.append(self._queue.popleft())
        self._queue.extendleft(reversed(others))
        return items

    @torch.inference_mode()
    def _start(self, items: list[Item]) -> Callable[[], list[tuple[Item, TopK]]]:
        inputs, targets = [item.input_ids for item in items], [item.targets for item in items]
        # [1, T, D] or [B, L, D] hidden states; logits if the head is not separable.
        batch = self._batch(inputs)
        if items[0].adapter != self._adapter:
            self._adapter = items[0].adapter
            select_adapter(self._model, self._adapter)
        output = self._model(**batch).logits if self._head is None else self._model.base_model(**batch)[0]
        lengths = np.array([len(ids) for ids in inputs])
        starts = lengths.cumsum() - lengths if self._packed else output.shape[1] * np.arange(len(lengths))
        rows = np.concatenate([start + item.rows for start, item in zip(starts, items, strict=True)])
        temperatures = np.repeat([item.temperature for item in items], [len(ids) for ids in targets])
        device = output.device if self._head is None else self._head.weight.device
        given = [item.reading.given_ids for item in items if item.reading.given_ids is not None]
        top = top_logprobs(
            output.flatten(0, 1)[to_device(rows, output.device)].to(device), self._logits,
            to_device(np.concatenate(targets), device), to_device(temperatures.astype(np.float32), device),
            max(item.k for item in items), items[0].num_ids,
            given=to_device(np.concatenate(given).astype(np.int64), device) if given else None,
        )
        return _copy_to_host(items, top)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits [r, V]; those of a half-precision head keep the GPU's float32 accumulation."""
        head = self._head
        if head is None:
            return hidden
        # In a model spread over several devices, a module has its own forward, which moves its inputs.
        plain = type(head) is torch.nn.Linear and getattr(head, "bias", None) is None and "forward" not in vars(head)
        if plain and hidden.device.type == "cuda" and hidden.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
        return head(hidden)


def _copy_to_host(items: list[Item], top: TopLogprobs) -> Callable[[], list[tuple[Item, TopK]]]:
    """Start to copy the items' scores to pinned memory; return a function that waits for them."""
    host = [part.to("cpu", non_blocking=True) for part in top]
    event = torch.cuda.Event(blocking=True) if top.ids.device.type == "cuda" else None
    if event is not None:
        event.record(torch.cuda.current_stream(top.ids.device))
    sizes = [len(item.rows) for item in items]

    def wait() -> list[tuple[Item, TopK]]:
        if event is not None:
            event.synchronize()
        found = []
        for item, *part in zip(items, *(part.split(sizes) for part in host), strict=True):
            ids, logprobs, tail, sampled = (each.numpy() for each in TopLogprobs(*part).first(item.k))
            scores = TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled)
            found.append((item, scores))
        return found

    return wait


def _load(options: EngineOptions, attention: str | None) -> Any:
    """Load the model. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            options.ckpt_path, trust_remote_code=options.trust_remote_code, attn_implementation=attention,
            dtype=torch.float32 if options.device == "cpu" else options.dtype,
            device_map="auto" if options.device == "cuda" else None, **options.arguments_of("hf"),
        ).eval()
    except Exception as error:  # various errors: a broken folder, insufficient GPU memory, unsupported attention
        raise ModelError(f"{options.ckpt_path}: the model cannot be loaded: {describe_error(error)}") from error
