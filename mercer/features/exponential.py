"""Random features of the exponential kernel: phi(q).phi(k) estimates exp(q.k), or exp(q' M'M k)."""

import math
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.errors import check_kind
from mercer.features.base import FeatureMap
from mercer.features.proposal import mean_square_proposal, optimal_proposal, root, tilt
from mercer.ops.checks import compute_dtype, full_precision
from mercer.ops.factored import Factored, group_heads
from mercer.ops.linear_solve import Rescaled


class _Exponential(FeatureMap):
    """A map with `log phi_j(x) = omega_j.x' - ||x'||^2 / 2 + bias_j - log(M) / 2`, x' = x or linear in x."""

    exponential = True

    def constants(self) -> Float[Tensor, "Hk M"] | None:
        """Return bias_j; None: 0."""
        return None

    def signed_directions(self) -> Float[Tensor, "Hk M D"]:
        """Return omega_j."""
        return self.omega

    def moved(self, x: Float[Tensor, "B Hk N D"]) -> Float[Tensor, "B Hk N rank"]:
        """Return x'."""
        return x

    def log_features(self, x):
        x, bias = self.moved(x), self.constants()
        constant = -x.square().sum(-1, keepdim=True) / 2 - math.log(self.num_features) / 2
        log_phi = x @ self.signed_directions().to(x.dtype).mT + constant
        return log_phi if bias is None else log_phi + bias.to(x.dtype)[:, None]

    def moved_tokens(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T rank"]:
        """Return x' of vectors that are not grouped by their directions."""
        moved = self.moved(group_heads(x, self.num_heads))
        return moved.reshape(*x.shape[:3], moved.shape[3])

    def factors(self, x, length):
        # M is applied first: absorbed in the directions, it would get its gradient through all of them
        x, weight, bias = self.moved_tokens(x), length * self.signed_directions().to(x.dtype), self.constants()
        constant, square = -math.log(self.num_features) / 2, -(length**2) / 2
        if bias is not None:  # as one more column, which makes the square of x larger by 1
            weight, constant = torch.cat([weight, bias.to(x.dtype)[..., None]], -1), constant - square
            x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        return Factored(x, weight, square, constant)

    def two_lengths(self, x, first, second):
        if self.constants() is not None or not self.worth_factoring(x):
            return super().two_lengths(x, first, second)
        with full_precision(x.device):
            x, second = (t.to(compute_dtype(x)) for t in (x, second))
            return self.factors(x, first), Rescaled((second / first)[..., 0])


class Favor(_Exponential):
    """Positive random features of the exponential kernel (FAVOR+).

    `log phi_j(x) = omega_j.x - ||x||^2 / 2 - log(M) / 2`, omega_j ~ N(0, I) fixed.

    Args:
        *sizes: see `FeatureMap`.
        **options: see `FeatureMap`.

    Source:
        Performer (arXiv:2009.14794), Lemma 1.

    >>> Favor(num_heads=2, head_dim=4, num_features=8)(torch.zeros(1, 2, 3, 4)).exp().square().sum(-1)[0, 0]
    tensor([1.0000, 1.0000, 1.0000])
    """

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.register_initial_values()


class Hyperbolic(_Exponential):
    """Positive random features in pairs omega, -omega: less variance than FAVOR+ for the same number of features.

    `log phi(x) = +-omega_j.x - ||x||^2 / 2 - log(M) / 2`, with M / 2 directions omega_j ~ N(0, I).

    Args:
        *sizes: see `FeatureMap`; num_features is even.
        **options: see `FeatureMap`.

    Source:
        Performer (arXiv:2009.14794), eq. 7: its m is our M / 2.
    """

    per_direction = 2

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.register_initial_values()

    def signed_directions(self):
        return torch.cat([self.omega, -self.omega], 1)


class Oprf(_Exponential):
    """Positive random features drawn from a proposal that fits the data (FAVOR++); the kernel stays exp(q.k).

    `log phi_j(x) = (B w_j).x + w_j' A w_j - ||x||^2 / 2 + log det(B) / 2 - log(M) / 2`, w_j ~ N(0, I),
    with the root B of the proposal's covariance B^2 and A = (I - B^2) / 4.

    Args:
        *sizes: see `FeatureMap`.
        mean_square: estimate of E||q + k||^2 that sets the start, B = b I. Default: 2 sqrt(D), of unit normal
            queries and keys scaled by D^(-1/4). `set_proposal` fits B to a covariance.
        **options: see `FeatureMap`.

    Source:
        FAVOR++ (arXiv:2205.15317), OPRF, B = b I with b^2 = 1 - 4A; DARKFormer (arXiv:2603.04127), Thm 3.2, a full B.
    """

    proposal: Tensor  # B
    bias: Tensor  # w'Aw + log det(B) / 2, while omega = B w

    def __init__(self, *sizes: int, mean_square: float | None = None, **options: Any):
        super().__init__(*sizes, **options)
        self.mean_square = 2 * math.sqrt(self.head_dim) if mean_square is None else mean_square
        self.register_initial_values()

    def initial_values(self):
        width = math.sqrt(mean_square_proposal(self.mean_square, self.head_dim))
        proposal = width * torch.eye(self.head_dim, device="cpu").repeat(self.num_heads, 1, 1)
        omega, bias = tilt(self.draw(), proposal)
        return {"omega": omega, "bias": bias, "proposal": proposal}

    def redraw(self, number):
        _install(self, number, self.proposal)

    def set_proposal(self, covariance: Float[Tensor, "Hk D D"]) -> None:
        """Draw from the best proposal for queries and keys of this covariance (Thm 3.2); the kernel stays."""
        _install(self, 0, root(optimal_proposal(covariance)))

    def constants(self):
        return self.bias


def _install(features: "Oprf | Darkformer", number: int, proposal: Tensor) -> None:
    """Replace, in place, proposal, directions and weights."""
    omega, bias = tilt(features.draw(number), proposal.float().cpu())
    with torch.no_grad():
        for name, value in (("proposal", proposal), ("omega", omega), ("bias", bias)):
            getattr(features, name).copy_(value)


class Darkformer(_Exponential):
    """Positive random features of exp(q' M'M k) with a learned metric M (DARKFormer).

    `log phi_j(x) = w_j.(M x) - ||M x||^2 / 2 - log(m) / 2`, w_j ~ N(0, I) fixed: at M = I exactly `Favor` of the same
    seed. With `proposal`, w_j is drawn from a proposal as in `Oprf`, and the kernel stays.

    Args:
        *sizes: see `FeatureMap`.
        rank: rows of M; default D.
        proposal: whether to carry a proposal B, the identity until `set_proposal`.
        **options: see `FeatureMap`.

    Raises:
        ValueError: a rank above head_dim.

    Source:
        DARKFormer (arXiv:2603.04127), sec. 3: Sigma = M'M, `metric` = M [H_kv, rank, D], `omega` = w [H_kv, m, rank].
    """

    learned = ("metric",)
    metric: Tensor
    proposal: Tensor | None
    bias: Tensor | None

    def __init__(self, *sizes: int, rank: int | None = None, proposal: bool = False, **options: Any):
        super().__init__(*sizes, **options)
        self._rank = self.head_dim if rank is None else rank
        check_kind("rank", self._rank, self.head_dim)
        if not 1 <= self._rank <= self.head_dim:
            raise ValueError(f"rank ({rank}) must be between 1 and head_dim ({self.head_dim}): M maps R^D to R^rank")
        self.carries_proposal = proposal
        self.register_initial_values()
        if not proposal:
            self.proposal, self.bias = None, None

    @property
    def rank(self):
        return self._rank

    def initial_values(self):
        identity = torch.eye(self.rank, self.head_dim, device="cpu").repeat(self.num_heads, 1, 1)
        values = {**super().initial_values(), "metric": identity}
        if not self.carries_proposal:
            return values
        proposal = identity[..., : self.rank].clone()
        return {**values, "proposal": proposal, "bias": tilt(values["omega"], proposal)[1]}

    def redraw(self, number):
        if self.proposal is None:
            super().redraw(number)
        else:
            _install(self, number, self.proposal)

    def set_proposal(self, covariance: Float[Tensor, "Hk D D"]) -> None:
        """Draw from the best proposal for queries and keys of this covariance before M (Thm 3.2); the kernel stays."""
        if self.proposal is None:
            raise ValueError("this map carries no proposal; build it with proposal=True")
        metric = self.metric.detach().to(covariance.dtype)
        _install(self, 0, root(optimal_proposal(metric @ covariance @ metric.mT)))

    def constants(self):
        return self.bias

    def moved(self, x):
        return x @ self.metric.to(x.dtype).mT


class Lfk(_Exponential):
    """Features of FAVOR+ whose directions are trained: the kernel is whatever they make it (LFK).

    `log phi_j(x) = omega_j.x - ||x||^2 / 2 - log(M) / 2`, omega a parameter that starts at the draw of `Favor`.

    Args:
        num_heads: see `FeatureMap`.
        head_dim: see `FeatureMap`.
        num_features: see `FeatureMap`.
        seed: of the start.
        directions: of the start, see `draw_directions`.

    Source:
        Learnable feature kernels, the baseline of DARKFormer (arXiv:2603.04127), sec. 4.
    """

    learned: ClassVar[tuple[str, ...]] = ("omega",)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_features: int = 256,
        *,
        seed: int = 0,
        directions: str = "orthogonal",
    ):
        super().__init__(num_heads, head_dim, num_features, seed=seed, directions=directions)
        self.register_initial_values()
