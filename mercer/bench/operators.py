"""What can be measured: each operator as its mixer calls it, from projected inputs to mixed values."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from mercer import ops
from mercer.features import FeatureMap, build_features
from mercer.mixers import Mixer, build_mixer

NUM_FEATURES = 256
NEAR = {"window": 64, "sinks": 4}


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
        options: of that mixer.
        chunked: whether `call` takes a chunk_size.
        beside: another operator whose time it is compared with, besides the reference.
    """

    make: Callable[[Shape], dict[str, Tensor]]
    call: Callable[..., Tensor]
    mixer: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    chunked: bool = False
    beside: str = ""


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
def _drawn(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> FeatureMap:
    """Return the feature map, drawn once and not in every call."""
    return build_features("favor", heads, head_dim, NUM_FEATURES).to(device, dtype)


def _favor(q: Tensor) -> Callable[[Tensor], Tensor | ops.Factored]:
    """Return the log features of a query or key."""
    features, scale = _drawn(q.shape[1], q.shape[3], q.dtype, q.device), q.shape[-1] ** -0.25
    return lambda x: features.factored(x, scale)


def _linear(q: Tensor, k: Tensor, v: Tensor, chunk_size: int = 128) -> Tensor:
    features = _favor(q)
    return ops.linear_attention(features(q), features(k), v, chunk_size=chunk_size)[0]


def _near_far(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    features = _favor(q)
    return ops.near_far_attention(q, k, v, features, features, window=NEAR["window"], sinks=NEAR["sinks"])[0]


@functools.lru_cache(maxsize=1)
def _linear_cubit_mixer(heads: int, head_dim: int, dtype: torch.dtype, device: str) -> Mixer:
    """Return the mixer with the features of `_linear` and without projections: r is k, and s is 1."""
    options = {"features": "favor", "num_features": NUM_FEATURES, "share": True, "lrr": False}
    mixer = build_mixer("linear_cubit", num_heads=heads, head_dim=head_dim, hidden_size=1, **options)
    return mixer.to(device, dtype)


def _linear_cubit_inputs(shape: Shape) -> dict[str, Tensor]:
    mixer = _linear_cubit_mixer(shape.heads, shape.head_dim, shape.dtype, shape.device)
    return _qkv(shape) | {name: p.detach().clone().requires_grad_() for name, p in mixer.named_parameters()}


def _linear_cubit(q: Tensor, k: Tensor, v: Tensor, **parameters: Tensor) -> Tensor:
    mixer = _linear_cubit_mixer(q.shape[1], q.shape[3], q.dtype, str(q.device))
    return functional_call(mixer, parameters, (q, k, v))[0]


# What is measured unless asked otherwise. kernel_solve is half of cubit; local_linear costs a hundred times SDPA.
DEFAULT_OPERATORS = ("softmax", "cubit", "deltaformer", "linear", "near_far", "linear_cubit")

BENCHES: dict[str, Operator] = {
    "softmax": Operator(_qkv, ops.softmax_attention, "softmax"),
    "kernel_solve": Operator(_cubit_system, _kernel_solve),
    "cubit": Operator(lambda shape: _qkv(shape) | _cubit_system(shape), _cubit, "cubit"),
    "deltaformer": Operator(lambda shape: _qkv(shape) | _gate(shape), _deltaformer, "deltaformer"),
    # These three with their features.
    "linear": Operator(_qkv, _linear, "performer", chunked=True),
    "near_far": Operator(_qkv, _near_far, "performer", NEAR, beside="linear"),
    "linear_cubit": Operator(
        _linear_cubit_inputs, _linear_cubit, "linear_cubit", {"features": "favor"}, beside="linear"
    ),
    "local_linear": Operator(_qkv, ops.local_linear_attention, "local_linear"),
}
