"""Kernel systems with feature-space weights: the quadratic definition, and the same in linear time, constant state."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.checks import (
    any_grad,
    check_heads,
    check_mask,
    check_segments,
    full_precision,
    per_row,
    refuse_tangents,
    repeat_heads,
    zero_padding,
)
from mercer.ops.factored import Factored, LogFeatures, added_of, arguments_of, dense, outline
from mercer.ops.linear_chunks import document_ids, num_threads
from mercer.ops.linear_definition import Definition, Sums, segment_after
from mercer.ops.linear_solve_passes import linear_kernel_solve_op
from mercer.ops.linear_step import solve_step


@dataclass(frozen=True)
class LinearSolveState(Sums):
    """What forward substitution in feature space remembers: its size does not depend on the length.

    Per feature f, over the real tokens of the current document, `S = sum_j exp(log_cols_jf - c_f) u_j` and
    `z = sum_j exp(log_cols_jf - c_f)`. Gradients flow through S and z; c only fixes the unit they are counted in.
    """


@dataclass(frozen=True)
class Rescaled:
    """Columns that are rows in factors at another length: the log features of factor x, of which the rows have x.

    One product serves both, as `log phi(s x) = s t - s^2 ||x||^2 / 2` with t = omega.x for positive random features.
    """

    factor: Float[Tensor, "B H T"]

    def check(self, log_rows: LogFeatures) -> Factored:
        """Return the rows.

        Raises:
            ValueError: rows are not in factors, or of other sizes.
        """
        if not isinstance(log_rows, Factored):
            raise ValueError(f"Rescaled columns need rows that are Factored, not {type(log_rows).__name__}")
        batch, heads, length, _ = log_rows.x.shape
        size = self.factor.shape
        if len(size) != 3 or (size[0], size[2]) != (batch, length) or heads % max(1, size[1]):
            rows = tuple(log_rows.outline().shape)
            raise ValueError(f"factor {tuple(size)} must be one number a token of log_rows {rows}")
        return log_rows

    def of(self, log_rows: LogFeatures, mask: Bool[Tensor, "B T"] | None = None) -> Factored:
        """Return the log features, without what rows add to a token by an offset."""
        rows = self.check(log_rows).without_padding(mask)
        factor = repeat_heads(zero_padding(self.factor[..., None], mask), rows.x.shape[1])
        return replace(rows, x=factor * rows.x, offset=None)


def linear_kernel_solve_naive(
    log_rows: Float[Tensor, "B H T m"] | Factored,
    log_cols: Float[Tensor, "B Hc T m"] | Factored | Rescaled,
    rhs: Float[Tensor, "B Hv T Dv"],
    *,
    ridge: float | Tensor,
    mask: Bool[Tensor, "B T"] | None = None,
    segments: Int[Tensor, "B T"] | None = None,
    state: LinearSolveState | None = None,
) -> tuple[Float[Tensor, "B _ T Dv"], LinearSolveState]:
    """Solve (P + diag(ridge)) u = rhs, P_ij = w_ij / sum_j w_ij, by building P and calling a dense solver.

    `w_ij = sum_f exp(log_rows_if + log_cols_jf)` over j <= i. Quadratic in memory, cubic in time, differentiable by
    autograd to any order. Arguments, returns and errors are those of `linear_kernel_solve`.

    Cost: O(B H T^2 (T + m)) time, O(B H T^2 m) memory.

    >>> r = torch.zeros(1, 1, 2, 4)
    >>> linear_kernel_solve_naive(r, r, torch.tensor([[[[1.0], [2.0]]]]), ridge=0.0)[0].flatten()
    tensor([1., 3.])
    """
    with full_precision(rhs.device):
        log_cols = dense(log_cols.of(log_rows) if isinstance(log_cols, Rescaled) else log_cols)
        log_rows = dense(log_rows)
        right, ridge_, past = prepare(log_rows, log_cols, rhs, ridge, mask, segments, state)
        log_rows, log_cols = (repeat_heads(x, right.shape[1]) for x in (log_rows, log_cols))
        definition = Definition.of(log_cols, mask, segments, past)
        weights, before, total = definition.weights(log_rows)
        system = weights / total + torch.diag_embed(ridge_)
        u = torch.linalg.solve_triangular(system, right - before @ past.S / total, upper=False)
        after = definition.sums_after(u)
        return u.to(rhs.dtype), LinearSolveState(sums=after.sums, c=after.c, segment=after.segment)


def linear_kernel_solve(
    log_rows: Float[Tensor, "B H T m"] | Factored,
    log_cols: Float[Tensor, "B Hc T m"] | Factored | Rescaled,
    rhs: Float[Tensor, "B Hv T Dv"],
    *,
    ridge: float | Tensor,
    mask: Bool[Tensor, "B T"] | None = None,
    segments: Int[Tensor, "B T"] | None = None,
    state: LinearSolveState | None = None,
    chunk_size: int = 128,
) -> tuple[Float[Tensor, "B _ T Dv"], LinearSolveState]:
    """Solve the causal kernel system (P + diag(ridge)) u = rhs with feature-space weights P, in linear time.

    `P_ij = w_ij / sum_j w_ij`, `w_ij = sum_f exp(log_rows_if + log_cols_jf)` over j <= i: Cubit's system with a feature
    map in place of the exponential kernel. Equal to `linear_kernel_solve_naive`; what lies before a block of tokens
    enters through carried sums, `u_t = (rhs_t - phi(row_t)' S / n_t) / (P_tt + ridge)`, and inside it one triangular
    system is solved. Through features the diagonal is no longer the largest weight of its row, so the ridge carries
    the stability: at 1, u is about as large as rhs.

    Args:
        log_rows: log features of the rows; `Factored` ones are not written to memory on a CPU.
        log_cols: log features of the columns. The same object as `log_rows` costs less than an equal one, and so do
            columns that are `Rescaled` rows.
        rhs: right-hand sides.
        ridge: added to the diagonal; a float, [H], or anything that broadcasts to [B, H, T].
        mask: True = real token, over the new tokens; padded tokens are seen by none, and their u is 0.
        segments: equal = same packed document; a document is one run of tokens. Continues the state's if it starts so.
        state: what an earlier call returned.
        chunk_size: tokens that share a scale, at most; on a CPU no more than 256 do.

    Returns:
        u of as many heads as the widest input has, in the dtype of rhs, and the state after the last token.

    Raises:
        ValueError: shapes do not fit together, or a segment comes back after another one.

    Cost: O(B H T m (Dv + chunk_size)) time. The backward pass, which is written by hand and cannot itself be
    differentiated, recomputes weights from inputs, u, one number a row and the sums that entered each chunk of at
    least 64 tokens: m (Dv + 2) numbers a chunk and head.

    Source: Cubit (arXiv:2605.06501), eq. 9-11, with phi(r).phi(r_unit) in place of exp(r.r_unit): ours.

    >>> r = torch.zeros(1, 1, 2, 4)  # equal weights: P = [[1, 0], [1/2, 1/2]]
    >>> u, state = linear_kernel_solve(r, r, torch.tensor([[[[1.0], [2.0]]]]), ridge=0.0)
    >>> u.flatten()
    tensor([1., 3.])
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size ({chunk_size}) must be at least 1")
    like_cols = outline(log_cols.check(log_rows) if isinstance(log_cols, Rescaled) else log_cols)
    right, ridge_, past = prepare(outline(log_rows), like_cols, rhs, ridge, mask, segments, state)
    heads, dtype = right.shape[1], past.sums.dtype
    if right.shape[2] == 1:
        with full_precision(rhs.device):
            cols = log_cols.of(log_rows, mask) if isinstance(log_cols, Rescaled) else log_cols
            rows, cols = (repeat_heads(dense(x, mask), heads) for x in (log_rows, cols))
            u, past = solve_step(rows, cols, right, ridge_, mask, segments, past)
        return u.to(rhs.dtype), LinearSolveState(sums=past.sums, c=past.c, segment=past.segment)
    documents = document_ids(mask, segments, past.segment)
    tensors, added = _arguments(log_rows, log_cols, heads, dtype, mask)
    tensors = (*tensors, right, ridge_, past.sums)
    refuse_tangents(*tensors)
    u, _, sums, c, *_ = linear_kernel_solve_op(
        *tensors, past.c, mask, documents, past.segment, *added, chunk_size, num_threads(), any_grad(*tensors)
    )
    state = LinearSolveState(sums=sums, c=c, segment=segment_after(documents, past))
    return u.to(rhs.dtype), state


def _arguments(
    log_rows: LogFeatures,
    log_cols: LogFeatures | Rescaled,
    heads: int,
    dtype: torch.dtype,
    mask: Bool[Tensor, "B T"] | None,
) -> tuple[tuple[Tensor | None, ...], tuple[float, ...]]:
    """Return log features as the operator takes them: tensors, and then square and constant of the columns.

    The tensors are x and weight of rows and of columns, the factor and the offset of columns; no columns: they are made
    of the rows' product.
    """
    with full_precision(outline(log_rows).device):
        rows = arguments_of(_of_heads(log_rows, heads), heads, dtype, mask)
        if isinstance(log_cols, Rescaled):
            factor = factor_of(log_cols, heads, dtype, mask)
            # given, or multiplied out: what a factor makes of the square of x is worked out here
            cols = log_cols.of(log_rows, mask) if rows[1] is None else log_cols.check(log_rows).without_offset()
            offset, *added = added_of(_of_heads(cols, heads), rows[1], dtype, mask)
            return (*rows, None, None, factor, offset), tuple(added)
        keys = _of_heads(log_cols, heads)
        cols = (None, None) if log_cols is log_rows else arguments_of(keys, heads, dtype, mask)
        offset, *added = added_of(keys, rows[1] if log_cols is log_rows else cols[1], dtype, mask)
        return (*rows, *cols, None, offset), tuple(added)


def _of_heads(log_phi: LogFeatures, heads: int) -> Any:
    """Repeat log features for every head of the widest input."""
    if not isinstance(log_phi, Factored):
        return repeat_heads(log_phi, heads)
    offset = None if log_phi.offset is None else repeat_heads(log_phi.offset, heads)
    weight = repeat_heads(log_phi.weight[None], heads)[0]
    return replace(log_phi, x=repeat_heads(log_phi.x, heads), weight=weight, offset=offset)


def factor_of(
    rescaled: Rescaled, heads: int, dtype: torch.dtype, mask: Bool[Tensor, "B T"] | None
) -> Float[Tensor, "B H T"]:
    """Return the factor for all heads, zeros where padded."""
    return repeat_heads(zero_padding(rescaled.factor[..., None].to(dtype), mask), heads)[..., 0]


def prepare(
    log_rows: Tensor,
    log_cols: Tensor,
    rhs: Tensor,
    ridge: float | Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    state: LinearSolveState | None,
) -> tuple[Tensor, Float[Tensor, "B H T"], Sums]:
    """Check the boundary; give right-hand sides and ridge all heads, and zeros and 1 where padded."""
    heads = max(x.shape[1] for x in (log_rows, log_cols, rhs))
    check_heads(heads, log_rows=log_rows, log_cols=log_cols, rhs=rhs)
    batch, _, length, features = log_rows.shape
    if (log_cols.shape[0], *log_cols.shape[2:]) != (batch, length, features):
        raise ValueError(
            f"log_cols {tuple(log_cols.shape)} must have the batch, tokens and features of log_rows "
            f"{tuple(log_rows.shape)}; pass the past as state"
        )
    if rhs.shape[0] != batch or rhs.shape[2] != length:
        raise ValueError(f"rhs {tuple(rhs.shape)} must have the batch and tokens of log_rows {tuple(log_rows.shape)}")
    check_mask(mask, batch, length)
    check_segments(segments, batch, length)
    needed = (batch, heads, features, rhs.shape[3])
    if state is not None and tuple(state.S.shape) != needed:
        raise ValueError(f"state holds sums S {tuple(state.S.shape)}; these inputs need {needed}")
    rhs = repeat_heads(rhs, heads)
    past = Sums.of(state, repeat_heads(log_cols, heads), rhs, log_rows)
    right = zero_padding(rhs.to(past.sums.dtype), mask)
    ridge_ = per_row("ridge", ridge, right)
    return right, ridge_ if mask is None else ridge_.masked_fill(~mask[:, None], 1.0), past
