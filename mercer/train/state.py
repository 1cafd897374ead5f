"""What a checkpoint holds of a run: weights, AdamW's moments by parameter name, and the random generators."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.optim import Optimizer

from mercer.errors import CheckpointError
from mercer.train.checkpoint import Position, Tensors, load, load_position, publish, save, verify
from mercer.train.distribution import World


def model_tensors(model: nn.Module) -> Tensors:
    """Return parameters and saved buffers by name; tied weights once."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict(keep_vars=True)}
    return dict(model.named_parameters()) | buffers


def optimiser_tensors(model: nn.Module, optimiser: Optimizer | None) -> Tensors:
    """Return the optimiser's state as `KEY/PARAMETER`, whatever the groups and their order; empty without one."""
    if optimiser is None:
        return {}
    named = model.named_parameters()
    return {f"{key}/{name}": tensor for name, p in named for key, tensor in optimiser.state.get(p, {}).items()}


def random_tensors(device: torch.device) -> Tensors:
    """Return the states of the random generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def save_run(
    checkpoints: Path, position: Position, model: nn.Module, optimiser: Optimizer | None, world: World, keep: int
) -> None:
    """Write a checkpoint of the whole run; a sharded one is written by every process, its own part each.

    A sharded one can be resumed on another number of processes, so it holds no random generators: a step draws nothing
    at random (batches are a function of the seed and their index, language models have no dropout).
    """
    parts = {"model": model_tensors(model), "optimiser": optimiser_tensors(model, optimiser)}
    if not position.sharded:
        if world.is_main:
            save(checkpoints, position, {**parts, "random": random_tensors(world.device)}, keep=keep)
        world.wait()
        return
    shards = checkpoints / ".shards"
    if world.is_main:
        shutil.rmtree(shards, ignore_errors=True)  # of processes that were killed while saving
    world.wait()
    try:
        writer = HuggingFaceStorageWriter(str(shards), save_distributed=True)
        state_dict_saver.save(_by_part(parts), storage_writer=writer)
    except CheckpointException as error:  # in every process, whichever it happened to
        raise OSError(_first_failure(error)) from error

    def adopt(aside: Path) -> None:
        for path in shards.iterdir():
            path.rename(aside / path.name)
        shards.rmdir()

    if world.is_main:
        publish(checkpoints, position, adopt, keep=keep)
    world.wait()


def load_run(path: Path, model: nn.Module, optimiser: Optimizer | None, world: World, *, sharded: bool) -> Position:
    """Put a checkpoint back into a freshly built model and optimiser.

    Raises:
        CheckpointError: it is damaged, or does not fit the model.
    """
    position = load_position(path)
    if position.sharded != sharded:
        shard = str(position.sharded).lower()
        raise CheckpointError(
            f"checkpoint {path} was written with train.shard {shard}; resume with --train.shard {shard}"
        )
    if sharded:
        assert optimiser is not None, "a sharded run descends a loss"
        _load_sharded(path, model, optimiser)
        return position
    position, files = load(path)
    put_back(path, model, optimiser, _by_part({part: files[part] for part in ("model", "optimiser")}))
    torch.set_rng_state(files["random"]["cpu"])
    if world.device.type == "cuda" and "cuda" in files["random"]:
        torch.cuda.set_rng_state(files["random"]["cuda"], world.device)
    return position


def tensors_of(model: nn.Module, optimiser: Optimizer | None) -> Tensors:
    """Return `model/NAME` and `optimiser/KEY/NAME`; `put_back` undoes it."""
    return _by_part({"model": model_tensors(model), "optimiser": optimiser_tensors(model, optimiser)})


def put_back(path: Path, model: nn.Module, optimiser: Optimizer | None, tensors: Tensors) -> None:
    """Put `model/NAME` and `optimiser/KEY/NAME` back, read from a checkpoint at `path`.

    Raises:
        CheckpointError: they do not fit the model.
    """
    weights = {name.removeprefix("model/"): x for name, x in tensors.items() if name.startswith("model/")}
    _fill(path, model_tensors(model), weights)
    named = dict(model.named_parameters())
    for full_name, tensor in tensors.items():
        part, _, rest = full_name.partition("/")
        if part == "optimiser":
            assert optimiser is not None, "a phase without an optimiser saves no state of one"
            key, _, name = rest.partition("/")
            optimiser.state[named[name]][key] = tensor.to(named[name].device)


def _by_part(parts: dict[str, Tensors]) -> dict[str, Tensor]:
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def _load_sharded(path: Path, model: nn.Module, optimiser: Optimizer) -> None:
    verify(path)
    for p in model.parameters():  # AdamW makes its state in the first step: make it now, so that there is room to read
        if p.requires_grad:
            zeros: dict[str, Any] = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            optimiser.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device), **zeros}
    room = tensors_of(model, optimiser)
    room = {name: tensor.detach() for name, tensor in room.items()}
    try:
        state_dict_loader.load(room, storage_reader=HuggingFaceStorageReader(str(path)))
    except CheckpointException as error:
        raise _other(path, _first_failure(error)) from error


def _first_failure(error: CheckpointException) -> str:
    cause, _ = next(iter(error.failures.values()))
    return str(cause).splitlines()[0]


@torch.no_grad()
def _fill(path: Path, room: Tensors, saved: Tensors) -> None:
    if unlike := sorted(set(room) ^ set(saved)):
        raise _other(path, f"{unlike[0]} is on one side only")
    for name, tensor in room.items():
        if tensor.shape != saved[name].shape:
            raise _other(path, f"{name} is {tuple(saved[name].shape)}, not {tuple(tensor.shape)}")
        tensor.copy_(saved[name])


def _other(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} is of another model ({what}); use --overwrite or another --out")
