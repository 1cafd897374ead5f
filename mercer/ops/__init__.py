"""Pure functions of tensors: each fast path sits under the `_naive` definition it equals."""

from mercer.ops.checks import repeat_heads, visible, zero_padding
from mercer.ops.factored import Factored
from mercer.ops.linear import LinearState, linear_attention, linear_attention_naive
from mercer.ops.linear_regression import (
    LinearRegressionState,
    linear_kernel_regression,
    linear_kernel_regression_naive,
)
from mercer.ops.linear_solve import LinearSolveState, Rescaled, linear_kernel_solve, linear_kernel_solve_naive
from mercer.ops.local_linear import local_linear_attention, local_linear_attention_naive
from mercer.ops.near_far import near_far_attention
from mercer.ops.near_far_definition import NearFarState, near_far_attention_naive
from mercer.ops.softmax import softmax_attention, softmax_attention_naive
from mercer.ops.solve import BIDIRECTIONAL_RIDGE, kernel_solve, kernel_solve_naive

__all__ = [
    "BIDIRECTIONAL_RIDGE",
    "Factored",
    "LinearRegressionState",
    "LinearSolveState",
    "LinearState",
    "NearFarState",
    "Rescaled",
    "kernel_solve",
    "kernel_solve_naive",
    "linear_attention",
    "linear_attention_naive",
    "linear_kernel_regression",
    "linear_kernel_regression_naive",
    "linear_kernel_solve",
    "linear_kernel_solve_naive",
    "local_linear_attention",
    "local_linear_attention_naive",
    "near_far_attention",
    "near_far_attention_naive",
    "repeat_heads",
    "softmax_attention",
    "softmax_attention_naive",
    "visible",
    "zero_padding",
]
