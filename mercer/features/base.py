"""What every feature map is: a module from vectors to the logs of positive features."""

import abc
import math
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mercer.errors import check_kind
from mercer.features.directions import draw_directions
from mercer.ops.checks import compute_dtype, full_precision
from mercer.ops.factored import Factored, group_heads
from mercer.ops.linear_solve import Rescaled


class FeatureMap(nn.Module, abc.ABC):
    """Map vectors x to log phi(x), so that phi(q).phi(k) is a kernel.

    Features stay in logs until an operator has found a scale for them. They are float32 at least, whatever x is: an
    exponent rounded to bfloat16 would be a feature wrong by a quarter. A map never scales its input.

    Args:
        num_heads: heads with directions of their own: the key heads; query heads of a group share them.
        head_dim: width D of x.
        num_features: features M of a head.
        seed: of the map's own draws, which are saved with the weights.
        directions: "gaussian", "orthogonal" or "simplex", see `draw_directions`.
        redraw_steps: steps of training after which `redraw` draws anew; None: never.

    Raises:
        ValueError: sizes below one, unknown directions.
    """

    exponential: ClassVar[bool] = False  # phi(q).phi(k) estimates exp(q.k): logits then carry the scale of softmax
    learned: ClassVar[tuple[str, ...]] = ()  # which of the initial values are parameters, the others being buffers
    per_direction: ClassVar[int] = 1  # features made of one direction
    omega: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_features: int = 256,
        *,
        seed: int = 0,
        directions: str = "orthogonal",
        redraw_steps: int | None = None,
    ):
        super().__init__()
        sizes = {"num_heads": num_heads, "head_dim": head_dim, "num_features": num_features}
        for name, size in (sizes if redraw_steps is None else {**sizes, "redraw_steps": redraw_steps}).items():
            check_kind(name, size, 1)
            if size < 1:
                raise ValueError(f"{name} ({size}) must be at least 1")
        if num_features % self.per_direction:
            raise ValueError(f"num_features ({num_features}) must be a multiple of {self.per_direction} for this map")
        self.num_heads, self.head_dim, self.num_features = num_heads, head_dim, num_features
        self.seed, self.directions, self.redraw_steps = seed, directions, redraw_steps

    def register_initial_values(self) -> None:
        """Make parameters and buffers of the initial values; constructors end with it."""
        for name, value in self.initial_values().items():
            value = value.to(torch.get_default_device())
            if name in self.learned:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    @property
    def rank(self) -> int:
        """Width of a direction."""
        return self.head_dim

    @property
    def direction_length(self) -> float:
        """Factor on directions that are drawn N(0, I)."""
        return 1.0 if self.exponential else self.head_dim**-0.5

    def draw(self, number: int = 0) -> Float[Tensor, "Hk N rank"]:
        """Return directions: a pure function of the constructor's options and the number of the draw."""
        count = self.num_features // self.per_direction
        omega = draw_directions(self.directions, self.num_heads, count, self.rank, seed=self.seed, number=number)
        return self.direction_length * omega

    def initial_values(self) -> dict[str, Tensor]:
        """Return a fresh start value, on the CPU, for every parameter and buffer."""
        return {"omega": self.draw()}

    def redraw(self, number: int) -> None:
        """Replace the directions by draw `number` of this map's seed, in place."""
        with torch.no_grad():
            self.omega.copy_(self.draw(number))

    def forward(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T M"]:
        """Return log phi(x).

        Args:
            x: vectors, of `num_heads` heads or a multiple; consecutive heads share a group's directions.

        Raises:
            ValueError: another width, or heads that are not a multiple.
        """
        self._check(x)
        with full_precision(x.device):
            grouped = group_heads(x.to(compute_dtype(x)), self.num_heads)
            return self.log_features(grouped).reshape(*x.shape[:3], self.num_features)

    def factored(self, x: Float[Tensor, "B H T D"], length: float = 1.0) -> Float[Tensor, "B H T M"] | Factored:
        """Return log phi(length x), not multiplied out where it is linear in few numbers: what the operators like best.

        Args:
            x: see calling the map, and so are the errors.
            length: factor on x.
        """
        self._check(x)
        x = x.to(compute_dtype(x))  # before the factor, which would be rounded with x
        with full_precision(x.device):
            factors = self.factors(x, length) if self.worth_factoring(x) else None
            return self(length * x) if factors is None else factors

    def worth_factoring(self, x: Float[Tensor, "B H T D"]) -> bool:
        """Whether an operator should multiply factors out itself: the features are many, and more than one token's."""
        return x.shape[2] > 1 and self.num_features > self.head_dim + 1

    def _check(self, x: Tensor) -> None:
        if x.shape[1] % self.num_heads or x.shape[1] == 0:
            raise ValueError(f"x has {x.shape[1]} heads; they must be a multiple of num_heads ({self.num_heads})")
        if x.shape[3] != self.head_dim:
            raise ValueError(f"x has width {x.shape[3]}; this map was made for head_dim {self.head_dim}")

    def two_lengths(
        self, x: Float[Tensor, "B H T D"], first: float, second: Float[Tensor, "B H T 1"]
    ) -> tuple[Float[Tensor, "B H T M"] | Factored, Float[Tensor, "B H T M"] | Factored | Rescaled]:
        """Return log phi(first x) and log phi(second x): rows and columns of a kernel system.

        Where log phi is linear in x but for the norm, one projection gives both, and the second is returned as a
        rescaling of the first.

        Args:
            x: vectors, of `num_heads` heads.
            first: a length, not 0.
            second: a length for each vector.
        """
        return self.factored(x, first), self.factored(second.to(compute_dtype(x)) * x)

    def factors(self, x: Float[Tensor, "B H T D"], length: float) -> Factored | None:
        """Return log phi(length x) in factors, if the map is of that kind."""
        return None

    @abc.abstractmethod
    def log_features(self, x: Float[Tensor, "B Hk N D"]) -> Float[Tensor, "B Hk N M"]:
        """Return log phi(x) of vectors grouped by their directions, in their own precision."""

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.head_dim}, {self.num_features}, directions={self.directions!r}"


def redraw(model: nn.Module, step: int) -> int:
    """Draw new directions in every feature map of `model` whose `redraw_steps` are over; return how many did.

    Call it once a step of training, with the number of steps done. Maps in evaluation mode keep what they have, and so
    do learned directions. A pure function of (seed, step): resuming at a step continues the same draws.
    """
    due = [
        module
        for module in model.modules()
        if isinstance(module, FeatureMap) and module.training and "omega" not in module.learned
        if module.redraw_steps is not None and step > 0 and step % module.redraw_steps == 0
    ]
    for module in due:
        module.redraw(step // (module.redraw_steps or 1))
    return len(due)


def unit_sum(log_phi: Float[Tensor, "*N M"]) -> Float[Tensor, "*N M"]:
    """Rescale the features of each token so that they sum to sqrt(M)."""
    return log_phi - torch.logsumexp(log_phi, -1, keepdim=True) + math.log(log_phi.shape[-1]) / 2
