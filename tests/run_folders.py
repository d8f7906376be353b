"""Run folders for tests, written by what writes those of runs, without models."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.launch.run import write_config
from hybrid_gkd.reporting.logs import failure_logged, run_log
from hybrid_gkd.reporting.starts import recorded_start
from hybrid_gkd.reporting.trackers import Tracking
from hybrid_gkd.runtime.spans import Span, SpanFile
from hybrid_gkd.types import Generation, RunInfo
from hybrid_gkd.workers.placement import Placement

logger = logging.getLogger("hybrid_gkd.tests")

GIB = 2**30
NASTY = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\"> & \u2028 é"
"""Text of a prompt, an answer, a warning."""


def make_run(
    parent: Path, name: str = "demo", *, steps: int = 30, first: int = 1, recipe: str = "demo",
    total: int | None = None, error: Exception | None = None, overrides: Sequence[str] = (), resume: bool = False,
    words: int = 0,
) -> Path:
    """A run of the steps from `first` on, that ends with `error`; where it is. `words`: so many more in an answer."""
    where = [f"trainer.default_local_dir={parent}", "trainer.project_name=p", f"trainer.experiment_name={name}"]
    config = load_config([*where, *overrides], config_name=recipe)
    distils, start = config.distillation.enabled, first - 1
    config.run_dir.mkdir(parents=True, exist_ok=True)
    info = RunInfo(
        project_name="p", experiment_name=name, run_dir=config.run_dir, config=asdict(config), total_steps=steps,
        resume=resume, start_step=start,
    )
    place = Placement(
        host="node", pid=1, visible_devices="0", device="NVIDIA H200", gpu="0", free_bytes=130 * GIB,
        total_bytes=140 * GIB,
    )  # fmt: skip
    about = {
        "step": start, "total_steps": total or steps, "recipe": recipe,
        "changed": {"trainer.logger": [["console"], []]}, "teacher_accuracy": 0.99 if distils else None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(type(error) if error else ()))
        stack.enter_context(run_log(config.run_dir))
        write_config(config)
        is_ready = stack.enter_context(recorded_start(config.run_dir, about))
        stack.enter_context(failure_logged())
        logger.info("versions: python 3.11, torch 2.13")
        logger.info("plan: workers: 1\nbatch: 128 prompts")
        logger.info("%s: %s", place.worker, place)
        logger.warning("a row has no answer: %s", NASTY)
        spans = stack.enter_context(contextlib.closing(SpanFile(config.run_dir / "logs" / "trainer.spans.jsonl")))
        worker = stack.enter_context(contextlib.closing(SpanFile(config.run_dir / "logs" / "worker_0.spans.jsonl")))
        tracking = stack.enter_context(Tracking([], info))
        is_ready()
        begun = time.monotonic()
        if start == 0:
            tracking.log_generations(samples(0, words), 0)
            tracking.log_tokens(tokens(0, words) if distils else [], 0)
            divergence = {"val/forward_kl": 2.0, "val/reverse_kl": 3.0} if distils else {}
            tracking.log({"val/accuracy": 0.2, "timing/testing": 1.0, **divergence}, 0)
        for step in range(first, steps + 1):
            record_spans(spans, worker, step, begun + 0.5 * step)
            tracking.log_lengths([step % 7, 3, 6, 8], step)
            row = step_row(step, distils=distils)
            if step % 10 == 0:
                tracking.log_generations(samples(step, words), step)
                tracking.log_tokens(tokens(step, words) if distils else [], step)
                row |= {"val/accuracy": 0.2 + 0.7 * step / steps}
                if distils:
                    row |= {"val/forward_kl": 2.0 / step, "val/reverse_kl": 3.0 / step, "val/forward_kl/q1": 1.0 / step}
            tracking.log(row, step)
            if step % 20 == 0:
                (config.run_dir / "latest_checkpointed_iteration.txt").write_text(str(step), encoding="utf-8")
        if error is not None:
            raise error
    return config.run_dir


def step_row(step: int, *, distils: bool) -> dict[str, float]:
    """Metrics of a step."""
    row = {
        "actor/loss": 1.0 / step, "actor/grad_norm": 2.0 + math.sin(step), "actor/entropy": 1.0 / math.sqrt(step),
        "timing/gen": 0.1, "timing/update_actor": 0.2, "timing/sync_rollout_weights": 0.05, "timing/step": 0.5,
        "perf/tokens_per_second": 1000.0, "response_length/mean": 6.0, "response_length/max": 8.0,
        "response_length/min": 1.0, "memory/rollout/engine_weights_gb": 3.0, "memory/rollout/kv_cache_gb": 60.0,
        "memory/update/actor_params_gb": 6.0, "memory/optimizer_step/optimizer_state_gb": 12.0,
    }  # fmt: skip
    if distils:
        return row | {"actor/kl_loss": 2.0 / step, "timing/wait_prev_teacher": 0.15, "teacher/latency": 0.1}
    return row | {"reward/mean": step / 100, "reward/gsm8k/mean": step / 200, "critic/vf_loss": 1.0 / step}


def samples(step: int, words: int = 0) -> list[Generation]:
    return [
        Generation(
            prompt=NASTY if n == 0 else f"sort {n}", response=f"{n} after {step} <b>steps</b>" + " word" * words,
            answer=str(n), reward=float(step > 9),
        )
        for n in range(3)
    ]  # fmt: skip


def tokens(step: int, words: int = 0) -> list[dict[str, Any]]:
    """Return the logged tokens of the second sample."""
    likely = [["1", 0.9, 0.5], ["</script>", 0.05, 0.25]]
    scored = [[text, 0.5 / (step + 1), likely, likely[::-1]] for text in ("1", " after", f" {step}", " <b>steps</b>")]
    return [{"prompt": "sort 1", "response": samples(step, words)[1].response, "num_tokens": 6, "tokens": scored}]


def record_spans(trainer: SpanFile, worker: SpanFile, step: int, begin: float) -> None:
    """Record a step of half a second: generation, a teacher's requests, update, publish."""
    parts = {"gen": 0.0, "wait_prev_teacher": 0.1, "update_actor": 0.25, "sync_rollout_weights": 0.45}
    for (name, start), end in zip(parts.items(), [*list(parts.values())[1:], 0.5], strict=True):
        trainer(Span("trainer", name, begin + start, begin + end, 0, step))
    for lane in range(2):
        trainer(Span("teacher", "request", begin + 0.08, begin + 0.2 + lane / 50, lane, step))
    worker(Span("worker 0", "gen", begin + 0.01, begin + 0.09, 0, step))
