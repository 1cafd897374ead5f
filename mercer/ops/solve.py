"""Kernel systems: find u with (gate P + ridge I) u = rhs, P the softmax kernel matrix of rows and columns."""

import warnings

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.errors import NumericalWarning
from mercer.ops.checks import (
    check_heads,
    check_mask,
    check_segments,
    compute_dtype,
    full_precision,
    per_row,
    refuse_tangents,
    repeat_heads,
    visible,
    zero_padding,
)
from mercer.ops.softmax import softmax_rows
from mercer.ops.solve_blocks import solve_blocks

BIDIRECTIONAL_RIDGE = 1e-3  # without causality nothing bounds the inverse but the ridge


def kernel_solve_naive(
    rows: Float[Tensor, "B H T D"],
    cols: Float[Tensor, "B Hc S D"],
    rhs: Float[Tensor, "B Hv T Dv"],
    *,
    ridge: float | Tensor,
    gate: float | Tensor | None = None,
    strict: bool = False,
    causal: bool = True,
    scale: float = 1.0,
    mask: Bool[Tensor, "B S"] | None = None,
    segments: Int[Tensor, "B S"] | None = None,
    past: Float[Tensor, "B H P Dv"] | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """Solve (gate_i P + diag(ridge)) u = rhs by building P and calling a dense solver.

    Quadratic in memory, cubic in time; see `kernel_solve` for the arguments.
    """
    if strict and not causal:
        raise ValueError("strict=True lets a row see j < i alone: it needs causal=True")
    with full_precision(rows.device):
        rows, cols, right, ridge, gate, past = _prepare(rows, cols, rhs, ridge, gate, scale, mask, segments, past)
        if not causal:
            ridge = _floor_ridge(ridge, past)
        seen = past.shape[2]
        allowed = visible(
            rows.shape[2], cols.shape[2], rows.device, causal=causal, strict=strict, mask=mask, segments=segments
        )
        weights = softmax_rows(rows @ cols.mT, allowed)
        if gate is not None:
            weights = gate[..., None] * weights
        system = weights[..., seen:] + torch.diag_embed(ridge)
        right = right - weights[..., :seen] @ past
        u = torch.linalg.solve_triangular(system, right, upper=False) if causal else torch.linalg.solve(system, right)
        return zero_padding(u, mask, rows=True).to(rhs.dtype)


def kernel_solve(
    rows: Float[Tensor, "B H T D"],
    cols: Float[Tensor, "B Hc S D"],
    rhs: Float[Tensor, "B Hv T Dv"],
    *,
    ridge: float | Tensor,
    gate: float | Tensor | None = None,
    strict: bool = False,
    causal: bool = True,
    scale: float = 1.0,
    mask: Bool[Tensor, "B S"] | None = None,
    segments: Int[Tensor, "B S"] | None = None,
    past: Float[Tensor, "B H P Dv"] | None = None,
    block_size: int = 128,
) -> Float[Tensor, "B H T Dv"]:
    """Solve the kernel system (gate_i P + diag(ridge)) u = rhs for the dual coefficients u.

    P[i, j] = softmax_j(scale * rows_i . cols_j) over j <= i (j < i if `strict`; all j if not `causal`).
    Equal to `kernel_solve_naive`, by block forward substitution u_I = (gate P_II + ridge)^-1 (rhs_I - gate P_I,<I u_<I)
    with a hand-written backward; neither pass holds more than one block of rows of P.
    Cubit: gate 1, rows r, cols gamma r / ||r||, rhs s v. DeltaFormer: strict, ridge 1, gate beta, rhs v.

    Args:
        rows: one row of the kernel matrix for each new position.
        cols: columns, over the past (P positions) and the new ones: S = P + T.
        rhs: right-hand sides of the new positions.
        ridge: added to the diagonal; a float, [H], or anything that broadcasts to [B, H, T].
        gate: factor on each row of P; as `ridge`. None: 1.
        strict: whether a position does not see itself.
        causal: False solves one dense T x T system; nothing bounds its inverse, so the ridge is raised to 1e-3.
        scale: factor on rows_i . cols_j.
        mask: True = real token, over S. Padded positions are seen by none, and their u is 0.
        segments: equal = same packed document, over S.
        past: u of the P past positions, as returned for them.
        block_size: rows solved at a time.

    Returns:
        u, in the dtype of `rhs`; computed in float32 at least. Expect ||u|| up to the order of T ||rhs||: pass
        float32 right-hand sides where u is used further.

    Raises:
        ValueError: heads that do not divide, lengths that do not add up, a mask that is not a padding mask.

    Warns:
        NumericalWarning: `causal=False` with a ridge below 1e-3, which is raised to it.

    Cost:
        Two products of attention's size forward, five backward: O(B H T S D) time, O(B H T D + block_size S) memory.

    Source:
        Cubit (arXiv:2605.06501), App. H: rows r, cols r_unit, ridge lambda; DeltaFormer (arXiv:2505.19488): gate beta.

    >>> r = torch.zeros(1, 1, 2, 4)  # equal weights: P = [[1, 0], [1/2, 1/2]]
    >>> kernel_solve(r, r, torch.tensor([[[[1.0], [2.0]]]]), ridge=0.0).flatten().tolist()
    [1.0, 3.0]
    """
    if block_size < 1:
        raise ValueError(f"block_size ({block_size}) must be at least 1")
    if not causal:
        return kernel_solve_naive(
            rows, cols, rhs, ridge=ridge, gate=gate, causal=False, strict=strict, scale=scale, mask=mask,
            segments=segments, past=past,
        )  # fmt: skip
    with full_precision(rows.device):
        rows, cols, right, ridge, gate, past = _prepare(rows, cols, rhs, ridge, gate, scale, mask, segments, past)
        refuse_tangents(rows, cols, right, ridge, gate, past)
        u = solve_blocks(rows, cols, right, ridge, gate, past, mask, segments, strict, block_size)
        return zero_padding(u, mask, rows=True).to(rhs.dtype)


def _prepare(
    rows: Tensor,
    cols: Tensor,
    rhs: Tensor,
    ridge: float | Tensor,
    gate: float | Tensor | None,
    scale: float,
    mask: Tensor | None,
    segments: Tensor | None,
    past: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Check the boundary; bring everything to one dtype, H heads, and zeros (diagonal 1) at padded positions."""
    heads = max(rows.shape[1], cols.shape[1], rhs.shape[1])
    check_heads(heads, rows=rows, cols=cols, rhs=rhs, **({} if past is None else {"past": past}))
    batch, length, seen = rows.shape[0], rows.shape[2], 0 if past is None else past.shape[2]
    if rhs.shape[2] != length or cols.shape[2] != seen + length:
        raise ValueError(
            f"rows, cols, rhs and past have {length}, {cols.shape[2]}, {rhs.shape[2]} and {seen} positions; "
            "rhs must have as many as rows, and cols as many as past and rows together"
        )
    check_mask(mask, batch, seen + length)
    check_segments(segments, batch, seen + length)
    dtype = compute_dtype(rows, cols, rhs, past)
    rows, cols, rhs = (repeat_heads(t.to(dtype), heads) for t in (rows, cols, rhs))
    if scale != 1.0:  # not before: 16-bit rows would be rounded again
        rows = rows * scale
    past = rhs[:, :, :0] if past is None else repeat_heads(past.to(dtype), heads)
    ridge = per_row("ridge", ridge, rhs)
    gate = None if gate is None else per_row("gate", gate, rhs)
    if mask is not None:
        rows, rhs, cols = (
            zero_padding(rows, mask, rows=True),
            zero_padding(rhs, mask, rows=True),
            zero_padding(cols, mask),
        )
        ridge = ridge.masked_fill(~mask[:, None, seen:], 1.0)
        gate = None if gate is None else gate.masked_fill(~mask[:, None, seen:], 0.0)
    return rows, cols, rhs, ridge, gate, past


def _floor_ridge(ridge: Float[Tensor, "B H T"], past: Float[Tensor, "B H P Dv"]) -> Float[Tensor, "B H T"]:
    if past.shape[2]:
        raise ValueError(f"past has {past.shape[2]} positions; a bidirectional system (causal=False) has no past")
    if not torch.compiler.is_compiling() and bool((ridge < BIDIRECTIONAL_RIDGE).any()):
        warnings.warn(
            f"a bidirectional kernel system is not always invertible: ridge {float(ridge.detach().min()):.3g} "
            f"raised to {BIDIRECTIONAL_RIDGE:g}; pass ridge >= {BIDIRECTIONAL_RIDGE:g} to choose it yourself",
            NumericalWarning,
            stacklevel=3,
        )
    return ridge.clamp(min=BIDIRECTIONAL_RIDGE)
