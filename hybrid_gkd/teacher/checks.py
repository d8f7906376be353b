"""Checks of scores before they reach a loss."""

from __future__ import annotations

import math

import numpy as np

from hybrid_gkd.errors import BadTeacherReply


def check_topk(
    ids: np.ndarray, logprobs: np.ndarray, sampled_logprobs: np.ndarray, *, num_rows: int, topk: int,
    vocab_size: int, server: str, request: str,
) -> None:
    """Refuse unusable scores.

    Args:
        ids: int32 [num_rows, topk], each in [0, vocab_size), distinct within a row
        logprobs: float [num_rows, topk], finite, not positive, of mass 1 at most
        sampled_logprobs: float [num_rows], finite, not positive

    Raises BadTeacherReply with server, request, row and value.
    """

    def fail(what: str, bad: np.ndarray, values: np.ndarray) -> None:
        if bad.any():
            place = tuple(int(index) for index in np.argwhere(bad)[0])
            raise BadTeacherReply(f"{server}: request {request}, row {place[0]}: {what} (value {values[place]})")

    shapes = {"ids": (ids, (num_rows, topk)), "logprobs": (logprobs, (num_rows, topk)),
              "sampled_logprobs": (sampled_logprobs, (num_rows,))}
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise BadTeacherReply(f"{server}: request {request}: {name} has shape {array.shape}, expected {shape}")
    for name, values in (("log-probability", logprobs), ("log-probability of the sampled token", sampled_logprobs)):
        if not -np.inf < values.min(initial=0) <= values.max(initial=0) <= 1e-3:  # NaN included
            fail(f"{name} is NaN", np.isnan(values), values)
            fail(f"{name} is infinite", np.isinf(values), values)
            fail(f"{name} is positive", values > 1e-3, values)
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
        fail(f"token id outside the vocabulary of {vocab_size}", (ids < 0) | (ids >= vocab_size), ids)
    ordered = np.sort(ids, axis=1)
    fail("token id appears twice", ordered[:, 1:] == ordered[:, :-1], ordered)
    mass = np.exp(logprobs, dtype=np.float32).sum(axis=1)
    # Rounding to float16 moves log p by |log p| / 2048 at most, so the mass by entropy / 2048 at most.
    fail("probabilities sum to more than 1", mass > 1.001 + (1 + math.log(topk)) / 2048, mass)
