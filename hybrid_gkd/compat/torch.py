"""Private interfaces of torch: end a backward pass of FSDP2 early, operate on many tensors in one kernel, take
optimizer steps on local shards, and set the timeout of process groups that libraries create."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def abandon_backward(model: Any) -> None:
    """Reset the root module of FSDP2 during a backward pass, so that a forward pass can begin.

    Drops the gradients that are not reduced yet, and runs the end of a backward pass, FSDPState's
    `_root_post_backward_final_callback`. Tested with torch 2.11 and 2.13. Raises AttributeError if these attributes
    differ.
    """
    model.set_reshard_after_backward(True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one or none
            for group in [state._fsdp_param_group] if groups is None else groups:
                for parameter in group.fsdp_params if group is not None else ():
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):  # exists after the first gather
                        parameter._unsharded_param.grad = None
    model._get_fsdp_state()._root_post_backward_final_callback()


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy every source to its target, possibly of another dtype, many of them in one kernel.

    Uses `torch._foreach_copy_`, tested with torch 2.11 and 2.13; raises AttributeError without it.
    """
    torch._foreach_copy_(targets, sources)


def scale_each(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply every tensor by a factor on its device, many of them in one kernel.

    Uses `torch._foreach_mul_`, tested with torch 2.13; raises AttributeError without it.
    """
    torch._foreach_mul_(tensors, factor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def set_timeout_of_new_groups(timeout: timedelta) -> None:
    """Give process groups that are created without a timeout this one: those of a mesh with two dimensions, and vLLM's.

    Otherwise theirs is half an hour, whatever the timeout of the default group. Sets `default_pg_timeout` of
    torch.distributed.distributed_c10d, which `new_group` reads; tested with torch 2.13.
    """
    dist.distributed_c10d.default_pg_timeout = timeout


class ShardAdamW(torch.optim.AdamW):
    """AdamW whose step computes on local shards; its parameters and state stay DTensors.

    DTensor's dispatch of lists takes longer than the step of a small model. Overrides `_init_group`, which collects the
    tensors of a step in lists; tested with torch 2.13. Without it, steps compute on DTensors, as torch's.
    """

    def _init_group(self, group: Any, *lists: list[Tensor]) -> Any:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_shard, tensors)
        return has_complex
