"""Pure functions of tensors: each fast path sits under the `_naive` definition it equals."""

from .local_linear import local_linear_attention, local_linear_attention_naive
from .softmax import softmax_attention, softmax_attention_naive
from .solve import kernel_solve, kernel_solve_naive

__all__ = [
    "kernel_solve",
    "kernel_solve_naive",
    "local_linear_attention",
    "local_linear_attention_naive",
    "softmax_attention",
    "softmax_attention_naive",
]
