"""Kernel ridge regression in feature space: dual coefficients from a kernel system, smoothed at the queries."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.checks import any_grad, refuse_tangents
from mercer.ops.factored import Factored, LogFeatures, outline
from mercer.ops.linear import LinearState, check_linear, linear_attention, linear_attention_naive, log_arguments
from mercer.ops.linear_chunks import document_ids, num_threads
from mercer.ops.linear_definition import Sums, segment_after
from mercer.ops.linear_regression_passes import linear_kernel_regression_op
from mercer.ops.linear_solve import (
    LinearSolveState,
    Rescaled,
    factor_of,
    linear_kernel_solve,
    linear_kernel_solve_naive,
    prepare,
)


@dataclass(frozen=True)
class LinearRegressionState:
    """The sums of the system and of the smoother: constant in the length."""

    system: LinearSolveState
    smoother: LinearState


def linear_kernel_regression_naive(
    log_q: Float[Tensor, "B H T m"] | Factored,
    log_k: Float[Tensor, "B Hk T m"] | Factored,
    rhs: Float[Tensor, "B Hk T Dv"],
    *,
    log_rows: Float[Tensor, "B Hk T n"] | Factored,
    log_cols: Float[Tensor, "B Hk T n"] | Factored | Rescaled,
    ridge: float | Tensor,
    mask: Bool[Tensor, "B T"] | None = None,
    segments: Int[Tensor, "B T"] | None = None,
    state: LinearRegressionState | None = None,
) -> tuple[Float[Tensor, "B H T Dv"], LinearRegressionState]:
    """Solve (P + diag(ridge)) u = rhs, then smooth, o = A u, both by their definitions.

    Arguments, returns and errors are those of `linear_kernel_regression`.

    Cost: that of `linear_kernel_solve_naive` and `linear_attention_naive`.

    >>> import torch
    >>> k, v = torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [2.0]]]])
    >>> linear_kernel_regression_naive(k, k, v, log_rows=k, log_cols=k, ridge=0.0)[0].flatten()
    tensor([1., 2.])
    """
    marks: dict[str, Any] = {"mask": mask, "segments": segments}
    system, smoother = (None, None) if state is None else (state.system, state.smoother)
    u, system = linear_kernel_solve_naive(log_rows, log_cols, rhs, ridge=ridge, state=system, **marks)
    o, smoother = linear_attention_naive(log_q, log_k, u, state=smoother, **marks)
    return o, LinearRegressionState(system, smoother)


def linear_kernel_regression(
    log_q: Float[Tensor, "B H T m"] | Factored,
    log_k: Float[Tensor, "B Hk T m"] | Factored,
    rhs: Float[Tensor, "B Hk T Dv"],
    *,
    log_rows: Float[Tensor, "B Hk T n"] | Factored,
    log_cols: Float[Tensor, "B Hk T n"] | Factored | Rescaled,
    ridge: float | Tensor,
    mask: Bool[Tensor, "B T"] | None = None,
    segments: Int[Tensor, "B T"] | None = None,
    state: LinearRegressionState | None = None,
    chunk_size: int = 256,
) -> tuple[Float[Tensor, "B H T Dv"], LinearRegressionState]:
    """Solve the causal kernel system (P + diag(ridge)) u = rhs, then smooth, o = A u, in linear time.

    P and A are row-normalised products of features: of rows and columns, and of queries and keys. Equal to
    `linear_kernel_regression_naive`. If `log_rows` is `log_k` itself, in factors, and the columns are `Rescaled` rows,
    as in ridge regression on one feature map, a CPU makes the product of all three once.

    Args:
        log_q: log features of the queries, H a multiple of Hk.
        log_k: log features of the keys.
        rhs: right-hand sides, the values.
        log_rows: log features of the system's rows.
        log_cols: log features of its columns.
        ridge: added to the diagonal; a float, [H], or anything that broadcasts to [B, H, T].
        mask: True = real token, over the new tokens; padded tokens are seen by none, and give 0.
        segments: equal = same packed document; a document is one run of tokens. Continues the state's if it starts so.
        state: what an earlier call returned.
        chunk_size: tokens that share a scale, at most; on a CPU no more than 256 do.

    Returns:
        The averages o, in the dtype of rhs, and the state after the last token.

    Raises:
        ValueError: shapes do not fit together, or a segment comes back after another one.

    Cost: that of `linear_kernel_solve` and `linear_attention`; where one product serves, O(B Hk T m D) less.

    Source: Cubit (arXiv:2605.06501), eq. 9-12, with products of features in place of exp: ours.

    >>> import torch
    >>> k, v = torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [2.0]]]])
    >>> o, state = linear_kernel_regression(k, k, v, log_rows=k, log_cols=k, ridge=0.0)
    >>> o.flatten()
    tensor([1., 2.])
    """
    marks: dict[str, Any] = {"mask": mask, "segments": segments}
    system, smoother = (None, None) if state is None else (state.system, state.smoother)
    if log_rows is log_k and isinstance(log_cols, Rescaled) and _one_product(log_k, rhs):
        return _together(log_q, log_k, rhs, log_cols, ridge, system, smoother, chunk_size, **marks)
    u, system = linear_kernel_solve(log_rows, log_cols, rhs, ridge=ridge, state=system, chunk_size=chunk_size, **marks)
    o, smoother = linear_attention(log_q, log_k, u, state=smoother, chunk_size=chunk_size, **marks)
    return o, LinearRegressionState(system, smoother)


def _one_product(log_k: LogFeatures, rhs: Tensor) -> bool:
    """Whether the operator can make the features of keys itself: on a CPU, in factors, one weight a key head."""
    if not isinstance(log_k, Factored) or log_k.offset is not None or log_k.x.device.type != "cpu":
        return False
    return rhs.shape[2] > 1 and log_k.x.shape[1] == rhs.shape[1] == len(log_k.weight)


def _together(
    log_q: LogFeatures,
    log_k: LogFeatures,
    rhs: Tensor,
    log_cols: Rescaled,
    ridge: float | Tensor,
    system: LinearSolveState | None,
    smoother: LinearState | None,
    chunk_size: int,
    *,
    mask: Bool[Tensor, "B T"] | None,
    segments: Int[Tensor, "B T"] | None,
) -> tuple[Float[Tensor, "B H T Dv"], LinearRegressionState]:
    """Do `linear_kernel_regression` in one pass."""
    outlines = outline(log_q), outline(log_k)
    log_cols.check(log_k)
    right, ridge_, past = prepare(outlines[1], outlines[1], rhs, ridge, mask, segments, system)
    check_linear(*outlines, rhs, causal=True, mask=mask, segments=segments, state=smoother, chunk_size=chunk_size)
    before = Sums.of(smoother, outlines[1], right, outlines[0])
    documents = document_ids(mask, segments, past.segment)
    *logs, _, square, constant = log_arguments(log_q, log_k, right, before, mask)
    factor = factor_of(log_cols, rhs.shape[1], before.sums.dtype, mask)
    tensors = (*logs, factor, right, ridge_, past.sums, before.sums)
    refuse_tangents(*tensors)
    o, u_sums, o_sums, u_scale, o_scale, *_ = linear_kernel_regression_op(
        *tensors, past.c, before.c, mask, documents, past.segment, square, constant, chunk_size, num_threads(),
        any_grad(*tensors),
    )  # fmt: skip
    segment = segment_after(documents, past)
    after = LinearSolveState(sums=u_sums, c=u_scale, segment=segment)
    return o.to(rhs.dtype), LinearRegressionState(after, LinearState(sums=o_sums, c=o_scale, segment=segment))
