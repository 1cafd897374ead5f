"""One process or many: what torchrun's environment says, and what the processes must agree on."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
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

    def share(self, batch: Any) -> Any:
        """Return this process's rows of a batch: every `size`-th one, from the `rank`-th on."""
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        rows = {name: t[self.rank :: self.size] for name, t in fields.items() if isinstance(t, Tensor)}
        return dataclasses.replace(batch, **rows)

    def deal(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Deal whole batches out, one a process in turn; all get equally many, the last ones without labels.

        A sharded model gathers its weights in every forward, so no process may call it more often than another.
        """
        round_: list[Any] = []
        for batch in batches:
            round_.append(batch)
            if len(round_) == self.size:
                yield round_[self.rank]
                round_ = []
        if round_:
            blank = dataclasses.replace(round_[0], labels=torch.full_like(round_[0].labels, -100), num_bytes=0)
            yield round_[self.rank] if self.rank < len(round_) else blank


@contextlib.contextmanager
def join() -> Iterator[World]:
    """Join the processes torchrun started, or stand alone; leave them at the end."""
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        yield World(0, 1, torch.device("cuda" if cuda else "cpu"))
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def distribute(model: nn.Module, world: World, *, shard: bool) -> nn.Module:
    """Wrap a model for its world: DDP, or FSDP2 one decoder layer at a time and then the root.

    Layers, never a mixer alone: FSDP gathers weights when `forward` of a wrapped module is called, and mixers are
    called in other ways as well.

    Raises:
        ValueError: `shard` is asked for outside of torchrun.
    """
    if shard:
        if not dist.is_initialized():
            raise ValueError(
                "train.shard (True) needs several processes: torchrun --nproc-per-node N -m mercer.cli ..."
            )
        names = set(getattr(model, "_no_split_modules", None) or [])
        for module in [module for module in model.modules() if type(module).__name__ in names]:
            fully_shard(module)
        return fully_shard(model)
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
    return tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor


def _has_idle_parameters(model: nn.Module) -> bool:
    """Say whether some parameters take no part (queries and keys of the `constant` mixer): DDP must be told."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    model(input_ids=tokens, use_cache=False).logits.sum().backward()
    idle = any(p.grad is None for p in model.parameters() if p.requires_grad)
    model.zero_grad(set_to_none=True)
    return idle
