"""One process or many: what torchrun's environment says, and what the processes must agree on."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> None:
        """Add a tensor over all processes, in place."""
        if self.size > 1:
            total = tensor.to(self.device)
            dist.all_reduce(total)
            tensor.copy_(total)

    def any(self, flag: bool) -> bool:
        """Say whether the flag is set in any process."""
        count = torch.tensor(float(flag))
        self.sum(count)
        return count.item() > 0

    def wait(self) -> None:
        """Wait until every process has come here."""
        if self.size > 1:
            dist.barrier()


def check(world: World, *, batch_size: int, shard: bool) -> None:
    """Make sure that a run fits its world.

    Raises:
        ValueError: `shard` is asked for outside of torchrun, or a batch cannot be dealt out evenly.
    """
    if shard and not dist.is_initialized():
        raise ValueError("train.shard (True) needs torchrun: torchrun --nproc-per-node N -m mercer.cli train ...")
    if batch_size % world.size:
        raise ValueError(
            f"train.batch_size ({batch_size}) must be a multiple of the number of processes ({world.size})"
        )


def join() -> World:
    """Join the processes torchrun started, or stand alone.

    A second call returns the same world: to leave a group and join it again at once is a race between processes.
    """
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        return World(0, 1, torch.device("cuda" if cuda else "cpu"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if not dist.is_initialized():
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo")
    return World(dist.get_rank(), dist.get_world_size(), device)


def leave() -> None:
    """Leave the group at the end of a program that went well.

    Not after an error: leaving waits for peers that may be waiting for us; torchrun ends them.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def distribute(model: nn.Module, world: World, *, shard: bool) -> nn.Module:
    """Wrap a model for its world: DDP, or FSDP2 one decoder layer at a time and then the root.

    Layers, never a mixer alone: FSDP gathers weights when `forward` of a wrapped module is called, and mixers are
    called in other ways as well.
    """
    if shard:
        names = set(getattr(model, "_no_split_modules", None) or [])
        for module in [module for module in model.modules() if type(module).__name__ in names]:
            fully_shard(module)
        fully_shard(model)  # changes the model in place
        return model
    if world.size == 1:
        return model
    return DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=_has_idle_parameters(model))


@contextlib.contextmanager
def gradients_shared(model: nn.Module, last: bool) -> Iterator[None]:
    """Exchange gradients only in the last backward of an accumulated step."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may be sharded as an ordinary one; every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _has_idle_parameters(model: nn.Module) -> bool:
    """Say whether some parameters take no part (queries and keys of the `constant` mixer): DDP must be told."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    model(input_ids=tokens, use_cache=False).logits.sum().backward()
    idle = any(p.grad is None for p in model.parameters() if p.requires_grad)
    model.zero_grad(set_to_none=True)
    return idle
