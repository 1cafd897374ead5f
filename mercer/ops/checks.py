"""What every operator checks and prepares at its boundary: dtypes, heads, padding masks, segments."""

import contextlib

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd import forward_ad


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which autocast is off: operators choose their own arithmetic."""
    if device.type == "meta":  # shapes alone: there is no autocast to turn off
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return float64 if any input has it, otherwise float32: the least an operator computes in."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def check_heads(num_heads: int, **tensors: Tensor) -> None:
    """Raise ValueError unless the named [B, H, T, D] tensors are of one batch and their heads divide `num_heads`."""
    batch = next(iter(tensors.values())).shape[:1]
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [batch, heads, time, width]")
        if num_heads % tensor.shape[1]:
            raise ValueError(f"{name} has {tensor.shape[1]} heads; the query heads ({num_heads}) must be a multiple")
        if tensor.shape[:1] != batch:
            rows = ", ".join(f"{n} {len(t)}" for n, t in tensors.items())
            raise ValueError(f"the batches differ ({rows} rows); expand() what all rows share")


def repeat_heads(tensor: Float[Tensor, "B G ..."], num_heads: int) -> Float[Tensor, "B H ..."]:
    """Give every query head of a group its own view of the group's head (a copy only where H > G > 1)."""
    if tensor.shape[1] == num_heads:
        return tensor
    if tensor.shape[1] == 1:
        return tensor.expand(-1, num_heads, *tensor.shape[2:])
    return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


def check_mask(mask: Tensor | None, batch: int, length: int) -> None:
    """Raise ValueError unless `mask` is None or a bool padding mask [batch, length]."""
    if mask is None:
        return
    if tuple(mask.shape) != (batch, length):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; it must be a padding mask [batch, keys] = ({batch}, {length}), "
            "True = real token; pairwise masks are not supported: use causal= and segments="
        )
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; it must be bool, True = real token: pass mask.bool()")


def check_segments(segments: Tensor | None, batch: int, length: int) -> None:
    """Raise ValueError unless `segments` is None or integer [batch, length]."""
    if segments is None:
        return
    if tuple(segments.shape) != (batch, length) or segments.dtype.is_floating_point or segments.dtype == torch.bool:
        raise ValueError(
            f"segments has shape {tuple(segments.shape)} and dtype {segments.dtype}; "
            f"it must be integer [batch, keys] = ({batch}, {length}), equal = same packed document"
        )


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError if a tensor given to a custom operator carries a tangent: PyTorch would drop it."""
    if torch.compiler.is_compiling():
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            "this operator has no forward-mode derivative (jvp, jacfwd, hessian); use reverse mode "
            "(torch.autograd.grad), or its definition, which is called like it with _naive at the end"
        )


def any_grad(*tensors: Tensor | None) -> bool:
    """Return whether a backward pass can come."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def visible(
    rows: int,
    cols: int,
    device: torch.device,
    *,
    causal: bool = True,
    strict: bool = False,
    mask: Bool[Tensor, "B S"] | None = None,
    segments: Int[Tensor, "B S"] | None = None,
) -> Bool[Tensor, "#B T S"]:
    """Return which of the S columns each row sees; the T rows are the last T of the S positions."""
    allowed = torch.ones(1, rows, cols, dtype=torch.bool, device=device)
    if causal:
        allowed = allowed.tril(cols - rows - int(strict))
    if mask is not None:
        allowed = allowed & mask[:, None, :]
    if segments is not None:
        allowed = allowed & (segments[:, cols - rows :, None] == segments[:, None, :])
    return allowed


def zero_padding(
    tensor: Float[Tensor, "B H T D"], mask: Bool[Tensor, "B S"] | None, *, rows: bool = False
) -> Float[Tensor, "B H T D"]:
    """Write zeros over padded positions, so that not even NaN there reaches a product.

    `rows=True`: the T positions are the last T of the mask's S.
    """
    if mask is None:
        return tensor
    keep = mask[:, mask.shape[1] - tensor.shape[2] :] if rows else mask
    return tensor.masked_fill(~keep[:, None, :, None], 0.0)


def per_row(name: str, value: float | Tensor, like: Float[Tensor, "B H T Dv"]) -> Float[Tensor, "B H T"]:
    """Broadcast a float, [H] or [B, H, T]-like value to one number a row."""
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    shape = like.shape[:3]
    tensor = tensor[:, None] if tensor.dim() == 1 else tensor
    if tensor.dim() == 3 and tensor.shape[1] not in (1, shape[1]):
        tensor = repeat_heads(tensor, shape[1])
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; it must be a number, [heads] or broadcast to {tuple(shape)}"
        ) from None
