"""What can be measured: each operator as its mixer calls it, from projected inputs to mixed values."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mercer import ops
from mercer.features import FeatureMap, build_features

NUM_FEATURES = 256


@dataclass(frozen=True)
class Shape:
    """The sizes of one measurement; `q k v r` are [batch, heads, length, head_dim]."""

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    device: str

    def tensor(self, seed: int, *, width: int | None = None) -> Tensor:
        """Return a normal [batch, heads, length, width] tensor that takes a gradient."""
        generator = torch.Generator().manual_seed(seed)
        size = (self.batch, self.heads, self.length, self.head_dim if width is None else width)
        values = torch.randn(size, generator=generator)
        return values.to(self.device, self.dtype).requires_grad_()

    def per_head(self, value: float) -> Tensor:
        """Return one learnable number a head."""
        return torch.full((self.heads,), value, device=self.device, requires_grad=True)


@dataclass(frozen=True)
class Operator:
    """An operator to measure: how its inputs are made, and how it is called with them.

    Attributes:
        make: leaf tensors that take gradients, and whatever else `call` needs, by name.
        call: the operator on what `make` returned.
        mixer: name of the mixer that decodes with it, "" where none does.
    """

    make: Callable[[Shape], dict[str, Tensor]]
    call: Callable[..., Tensor]
    mixer: str


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call PyTorch's own attention: what everything is measured against."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _qkv(shape: Shape) -> dict[str, Tensor]:
    return {name: shape.tensor(seed) for seed, name in enumerate("qkv")}


def _cubit_system(shape: Shape) -> dict[str, Tensor]:
    rescale = shape.tensor(4, width=1).detach().sigmoid().mul(1.5).add(0.5).requires_grad_()
    one = {"r": shape.tensor(3), "v": shape.tensor(2), "s": rescale}
    return one | {"gamma": shape.per_head(1.0), "log_ridge": shape.per_head(math.log(1e-10))}


def _kernel_solve(r: Tensor, v: Tensor, s: Tensor, gamma: Tensor, log_ridge: Tensor) -> Tensor:
    r_unit = gamma[:, None, None].to(r.dtype) * F.normalize(r, dim=-1, eps=1e-6)
    return ops.kernel_solve(r, r_unit, s * v, ridge=log_ridge.exp())


def _cubit(q: Tensor, k: Tensor, **system: Tensor) -> Tensor:
    return ops.softmax_attention(q, k, _kernel_solve(**system))


def _gate(shape: Shape) -> dict[str, Tensor]:
    return {"gate": shape.tensor(5, width=1)}


def _deltaformer(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    u = ops.kernel_solve(q, k, v, ridge=1.0, gate=gate[..., 0], strict=True, scale=q.shape[-1] ** -0.5)
    return ops.softmax_attention(q, k, u)


@functools.lru_cache(maxsize=1)
def _favor(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> FeatureMap:
    """Return the feature map, drawn once and not in every call."""
    return build_features("favor", heads, head_dim, NUM_FEATURES).to(device, dtype)


def _linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    features = _favor(q.shape[1], q.shape[3], q.dtype, q.device)
    scale = q.shape[-1] ** -0.25
    return ops.linear_attention(features(scale * q), features(scale * k), v)[0]


# What is measured unless asked otherwise; local_linear costs a hundred times SDPA and is left out.
DEFAULT_OPERATORS = ("softmax", "kernel_solve", "cubit", "deltaformer", "linear")

BENCHES: dict[str, Operator] = {
    "softmax": Operator(_qkv, ops.softmax_attention, "softmax"),
    "kernel_solve": Operator(_cubit_system, _kernel_solve, ""),
    "cubit": Operator(lambda shape: _qkv(shape) | _cubit_system(shape), _cubit, "cubit"),
    "deltaformer": Operator(lambda shape: _qkv(shape) | _gate(shape), _deltaformer, "deltaformer"),
    "linear": Operator(_qkv, _linear, ""),  # features included
    "local_linear": Operator(_qkv, ops.local_linear_attention, "local_linear"),
}
