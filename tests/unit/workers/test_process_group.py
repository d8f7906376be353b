"""Process groups of the workers, in a group of one."""

import os
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.testing import tiny_config
from hybrid_gkd.workers.process_group import GroupMember


def test_groups_within_the_workers_wait_as_long_as_the_group_of_all(monkeypatch):
    """Such as those of shards and replicas with fsdp_size: a hung worker must not end its peers before its caller."""
    monkeypatch.setattr(dist.distributed_c10d, "default_pg_timeout", timedelta(minutes=30))
    config = tiny_config("actor_rollout_ref.nccl_timeout=7200")
    member = GroupMember(config, role="worker", rank=0, size=1, device_type="cpu")
    with mock.patch.dict(os.environ):
        member.join(("127.0.0.1", 0), Timeout(60, "actor_rollout_ref.load_timeout"))
        try:
            groups = dist.group.WORLD, dist.new_group([0])
            found = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
        finally:
            dist.destroy_process_group()
    assert found == [timedelta(seconds=7260)] * 2
