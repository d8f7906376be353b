"""Which calls are taken for stuck after a failure, and the errors about them, without Ray."""

import inspect
import socket

import pytest
from ray.exceptions import RayActorError, RayTaskError

from hybrid_gkd.config import Config
from hybrid_gkd.errors import WorkerError
from hybrid_gkd.process_limits import ProcessLimit
from hybrid_gkd.workers import liveness
from hybrid_gkd.workers import pool as pools
from hybrid_gkd.workers.liveness import RAYLET, Liveness, RayLost
from hybrid_gkd.workers.pool import Pool
from hybrid_gkd.workers.worker import DESCRIPTIONS, Worker


@pytest.mark.parametrize(
    ("method", "fsdp_size", "expected"),
    [
        ("compute_logprobs", -1, [0, 1, 3]), ("compute_logprobs", 2, [3]), ("compute_logprobs", 1, []),
        ("publish", 2, [3]), ("accumulate", 2, [0, 1, 3]), ("accumulate", 1, [0, 1, 3]),
        ("update", 1, [0, 1, 3]), ("compute_values", 1, [0, 1, 3]), ("save_checkpoint", 1, [0, 1, 3]),
        ("generate", -1, [3]), ("finish_snapshot", -1, []),
    ],
)  # fmt: skip
def test_those_wait_for_a_failed_worker_who_share_weights_or_gradients_with_it(method, fsdp_size, expected, tmp_path):
    config = Config()
    config.trainer.n_gpus_per_node = 4
    config.actor_rollout_ref.actor.fsdp_config.fsdp_size = fsdp_size
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    pool, other = (Pool(config, role=role, log_folder=tmp_path) for role in ("actor worker", "rollout worker"))
    pool.mark_stuck_peers(method, 2, {rank: (pool, rank) for rank in range(4)} | {4: (other, 3)})
    assert sorted(pool.stuck_calls) == expected


def test_every_call_to_a_worker_has_a_description_in_the_words_of_users():
    methods = {name for name, _ in inspect.getmembers(Worker, inspect.isfunction) if not name.startswith("_")}
    assert methods - {"join"} == set(DESCRIPTIONS)  # `join` is called by the worker itself
    assert not [text for text in DESCRIPTIONS.values() if "_" in text or not text.startswith("the ")]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RayTaskError("Worker.initialize", "", ValueError("planted")), "failed during the loading of the models"),
        (RayActorError(), "died during the loading of the models"),
    ],
)
def test_errors_of_a_call_are_described_without_the_name_of_its_method(raised, expected, tmp_path, monkeypatch):
    def get(*args, **options):
        raise raised

    monkeypatch.setattr(pools.ray, "get", get)
    pool = Pool(Config(), role="worker", log_folder=tmp_path)
    with pytest.raises(WorkerError, match=rf"^worker 0 {expected}: .*worker_0\.log\)$") as found:
        pool.get("initialize", None, 0)
    late = pool.timeout_error("initialize", [0])
    assert "no answer from worker 0 within 600 s (actor_rollout_ref.nccl_timeout) during the loading" in str(late)
    assert "initialize" not in f"{found.value} {late}"


def test_workers_that_end_because_their_owner_is_counted_as_lost_have_died_with_its_raylet(tmp_path, monkeypatch):
    """The owner is this process, so the raylet of its machine has ended, whose socket may still be open."""

    def get(*args, **options):
        raise RayActorError(error_msg="The actor is dead because its owner has died. Exit detail: node has crashed.")

    monkeypatch.setattr(pools.ray, "get", get)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watched = [Liveness({RAYLET: listener.getsockname()}, 60.0)]
        monkeypatch.setattr(liveness, "_watched", watched)
        pool = Pool(Config(), role="worker", log_folder=tmp_path)
        with pytest.raises(RayLost, match=r"^Ray's raylet on this machine has ended: worker 0 died during .*worker_0"):
            pool.get("generate", None, 0)
    assert liveness.lost_process() == RAYLET


def test_a_worker_that_never_started_has_rays_reason_the_likely_cause_and_the_limits(tmp_path, monkeypatch):
    reason = "The actor is dead because its worker process has died. Some common causes include: (1) the OOM killer."
    raised = RayActorError(error_msg=f"The actor died.\n\tpid: 1\n{reason}\n{pools.NEVER_RAN} - it was cancelled.")

    def get(*args, **options):
        raise raised

    monkeypatch.setattr(pools.ray, "get", get)
    monkeypatch.setattr(pools.ray, "wait", lambda refs, **options: (refs[:1], refs[1:]))
    monkeypatch.setattr(pools, "process_limits", lambda: [ProcessLimit("ulimit -u", 512, 510)])
    pool = Pool(Config(), role="worker", log_folder=tmp_path)
    with pytest.raises(WorkerError) as found:
        pools.gather("begin", {"call": (pool, 0)})
    assert "worker process has died. Its process did not start, likely because memory or processes" in str(found.value)
    assert "exhausted; ulimit -u is 512, 510 in use (log: " in str(found.value)
    assert "never ran" not in str(found.value)
    assert found.value.__cause__ is raised  # whose paragraph of possible reasons belongs into run.log
