"""Token weights of the distillation term, as far as the trainer can compute them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hybrid_gkd.config import Config, distillation_terms, run_teachers, summed_teachers
from hybrid_gkd.losses.token_weights import TokenSignals, compute_weights, num_selected
from hybrid_gkd.types import Sample, Task, TopK, teacher_scores, with_tasks


class Weighting:
    """Applies `distillation.token_weights` to samples.

    If distillation is the only term of the loss, tokens of weight 0 are not trained, and the tokens after the last
    selected one are cut, for the student and, if the weights are known before scoring, for the teacher. Otherwise the
    weights are added as the signal `token_weights`. Weights that need the student's distribution are computed in its
    forward pass; only their number is known here.
    """

    def __init__(self, config: Config):
        self._row, self._selects = config.distillation.weighting, config.distils_alone
        self._terms, summed = tuple(distillation_terms(config)), summed_teachers(config)
        self._others = {
            key: [f"distillation/{each.name}" for each in summed if each.key != key] for key in {s.key for s in summed}
        }
        """Terms of the teachers that do not score the rows with a key, with distillation.ensemble=sum."""
        needs = None if self._row is None else self._row.needs
        # The cache has scores of whole completions only.
        has_cache = any(teacher.section.cache is not None for teacher in run_teachers(config))
        if needs == "completion" and self._selects and has_cache:
            needs = "teacher"
        self.needs_scores, self._before = needs == "teacher", needs == "completion"
        self.cuts_before = self._before and self._selects
        """Whether the teacher scores the selected tokens only."""

    def before_scoring(self, sample: Sample) -> Sample:
        """Return the sample that the teacher scores."""
        return self._weighed(sample) if self._before else sample

    def after_scoring(self, sample: Sample) -> Sample:
        """Return the sample that is trained, given one with the teacher's scores."""
        return self._weighed(sample) if self.needs_scores and teacher_scores(sample) else sample

    def without_others(self, tasks: Iterable[Task], samples: list[Sample]) -> list[Sample]:
        """Give tokens weight 0 in the terms of teachers that do not score their rows."""
        if not any(self._others.values()):
            return samples
        pairs = with_tasks(tasks, samples)
        return [_unweighted(sample, self._others.get(task.teacher or "", [])) for task, sample in pairs]

    def without_teacher(self, sample: Sample) -> Sample:
        """Return a sample that the teacher does not score: its tokens have weight 0 in the distillation term.

        If that is the only term, one token is kept, since a mini-batch without any token cannot be trained.
        """
        if self._selects:
            sample = sample.only(np.arange(sample.num_trained) < 1)
        return _unweighted(sample, self._terms)

    def metrics(self, before: list[Sample], after: list[Sample]) -> dict[str, float]:
        """Return the fraction of trained tokens with a weight above 0, given the samples without and with weights."""
        if self._row is None:
            return {}
        after = [sample for sample in after if teacher_scores(sample)]
        if self._row.needs == "student":
            kept = (s.array("weights") if "weights" in s.signals else np.ones(s.num_trained) for s in after)
            selected = [num_selected(self._row.options["fraction"], int(np.count_nonzero(each))) for each in kept]
        else:
            selected = [
                int(np.count_nonzero(s.array("token_weights"))) if "token_weights" in s.signals else s.num_trained
                for s in after
            ]
        num_tokens = sum(sample.num_trained for sample in before)
        return {"actor/distillation/selected_fraction": float(sum(selected) / num_tokens)}

    def _weighed(self, sample: Sample) -> Sample:
        assert self._row is not None
        scores = sample.signals.get("teacher")
        weights = compute_weights(self._row, TokenSignals(
            token_ids=sample.trained_ids, positions=np.arange(sample.num_trained), length=sample.num_trained,
            logprobs=sample.logprobs, teacher=scores if isinstance(scores, TopK) else None,
        ), f" for {sample.id}")  # fmt: skip
        if self._selects:
            sample, weights = sample.only(weights > 0), weights[weights > 0]
        return sample if (weights == 1).all() else sample.with_signals(token_weights=weights)


def _unweighted(sample: Sample, terms: Iterable[str]) -> Sample:
    """Return the sample with weight 0 for all tokens in these terms."""
    zeros = np.zeros(sample.num_trained, np.float32)
    return sample.with_signals(**{f"weights/{term}": zeros for term in terms})
