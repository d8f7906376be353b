"""Tokens count more where the student found them likelier than the teacher does."""

import numpy as np


def surprise(signals, *, limit):
    """0 where the teacher finds the token at least as likely or has no score, else the log-ratio, at most `limit`."""
    if signals.logprobs is None:  # a given completion
        return np.ones(signals.length)
    return np.nan_to_num(np.clip(signals.logprobs - signals.teacher.sampled_logprobs, 0, limit))
