"""Calls of a worker around a generation, with stand-ins for its engine and its device."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from hybrid_gkd.errors import WorkerError, describe_error
from hybrid_gkd.offload.residency import MemoryOwner, Residency
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.testing import tiny_config
from hybrid_gkd.types import SamplingParams
from hybrid_gkd.workers.worker import Worker

GIB = 2**30


class Params(MemoryOwner):
    """10 GiB, on the host."""

    there = 0

    def num_bytes(self):
        return 10 * GIB

    def start_acquire(self, room, most):
        self.there += min(10 * GIB - self.there, room, most)
        return 10 * GIB - self.there


@pytest.mark.parametrize(("free", "meanwhile", "at_the_end"), [(40, 10, 10), (25, 7, 10), (15, 0, 10), (9, 0, 5)])
def test_parameters_come_during_the_rollout_where_engine_and_teacher_keep_room_to_work(free, meanwhile, at_the_end):
    """Engine and teacher keep 14 GiB while they work; a margin of 4 stays in any case."""
    config = tiny_config()
    worker, params, found = Worker(config, role="worker", rank=0, size=1, device="cpu", folder="."), Params(), []

    def step():
        found.append(params.there / GIB)
        return [None]

    worker.clock = Clock()
    worker.engine = SimpleNamespace(weight_version=0, add=lambda *_: None, has_unfinished=True, step=step)
    worker.shared = SimpleNamespace(generation=nullcontext)
    worker.residency = Residency(
        {"actor_params": params}, movable={"actor_params"}, resident=set(),
        free_bytes=lambda: free * GIB - params.there,
    )
    assert len(list(worker.generate([None], SamplingParams(max_tokens=1)))) == 1
    assert (*found, params.there / GIB) == (meanwhile, at_the_end)


def test_an_engine_that_has_made_room_gets_the_weights_of_the_last_publish_before_it_generates():
    """Where it sleeps, its weights are gone: values, divergences, rewards of a model and checkpoints need the room."""
    config = tiny_config()
    worker, phases, loaded = Worker(config, role="worker", rank=0, size=1, device="cpu", folder="."), [], []

    class Engine:
        weight_version, has_unfinished, dtype = None, True, None

        def load_weights(self, weights, version):
            loaded.append((list(weights), version))
            self.weight_version = version

        def add(self, *_):
            assert self.weight_version == 3

        def step(self):
            return [None]

    worker.clock, worker.engine = Clock(), Engine()
    worker.actor = SimpleNamespace(full_tensors=lambda dtype: iter([("weight", 1.0)]))
    worker.shared = SimpleNamespace(generation=nullcontext, trim_after_publish=lambda: 0.0)
    worker.residency = SimpleNamespace(
        enter=lambda phase, **_: phases.append(phase), prepare=lambda *_, **__: 0, has_movable_owners=False,
        take_seconds=dict,
    )
    worker.publish(3)
    for is_asleep in (False, True):
        if is_asleep:
            worker.engine.weight_version = None
        assert len(list(worker.generate([None], SamplingParams(max_tokens=1)))) == 1
    assert loaded == [([("weight", 1.0)], 3)] * 2
    assert phases == ["update", "publish", "rollout", "rollout", "update", "publish", "rollout", "rollout"]


class Fields(BaseModel):
    blocks: int


@pytest.mark.parametrize(
    ("method", "arguments", "what"),
    [("generate", ([], None), "the generation"), ("compute_topk", ((),), "the computation of the student's .* tokens")],
)
def test_the_error_of_a_library_is_told_in_full_by_the_worker(method, arguments, what):
    """Its first line is a number of errors, and its class may not survive the way to the driver."""
    config = tiny_config()
    worker = Worker(config, role="rollout worker", rank=3, size=4, device="cpu", folder=".")
    worker.clock, worker.engine = Clock(), SimpleNamespace(weight_version=1)
    worker.residency = SimpleNamespace(enter=lambda _: Fields(blocks="many"))
    worker.updater = SimpleNamespace(forward=lambda _: Fields(blocks="many"))
    expected = rf"^rollout worker 3 failed during {what}: ValidationError: 1 .*blocks.*'many'"
    with pytest.raises(WorkerError, match=expected):
        list(getattr(worker, method)(*arguments))


def test_very_long_errors_are_cut_in_the_middle():
    error = RuntimeError("first\n\n" + "between\n" * 500 + "last")
    assert re.fullmatch(r"RuntimeError: first (between )+.* \.\.\. .* between last", describe_error(error))
    assert len(describe_error(error)) < 640
    assert describe_error(KeyError()) == "KeyError"
