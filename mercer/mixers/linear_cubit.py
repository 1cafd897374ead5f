"""Linear Cubit: kernel ridge regression on positive features, in linear time and with a constant state."""

from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from mercer import ops
from mercer.errors import unknown
from mercer.features import build_features, feature_options
from mercer.mixers.base import Mixer, marks_of_new, refuse_state
from mercer.mixers.cubit import add_parameters, gamma, reference, rescaled, start_values
from mercer.mixers.linear import root_scale, split_options

State = ops.LinearRegressionState | None


class LinearCubit(Mixer):
    """Cubit with features: (P + ridge I) u = s v and o = A u, P and A row-normalised products phi(.).phi(.).

    P_ij ~ exp(r_i . gamma r_j / ||r_j||) through the feature map; A_ij ~ exp(scale q_i . k_j). The kernels depend on
    products alone, so r and r_unit are brought near to one length first, by the factor D^(1/4).

    With `share` both kernels have one map as well: u are then the coefficients of a regression on the very features
    that smooth them, which before training is several times nearer to Cubit with exact kernels than two maps are, and a
    projection less to work out.

    Args:
        features: a name in `mercer.FEATURES`, for both kernels, each with a map of its own unless `share`.
        num_features: features m of a head.
        share: use r = k instead of a projection of its own, and one map.
        lrr: rescale the values as Cubit does.
        gamma: "raw" or "softplus", see `Cubit`.
        ridge: start value of exp(log_ridge). Through features the diagonal is not the row's maximum any more, so the
            ridge carries the stability: at 1 u is as large as the values, at 0.1 eight times as large.
        **options: of the feature map and sizes, see `Mixer`; causal only.

    Raises:
        ValueError: an unknown `gamma` or map, a ridge that is not positive, `causal=False`; `share` at scale 0.

    Source:
        Ours: Cubit (arXiv:2605.06501) in the feature space of Performer or DARKFormer.

    >>> mixer = LinearCubit(num_heads=2, head_dim=4, hidden_size=8, num_features=16)
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> o, state = mixer(q, k, v, x=torch.randn(1, 5, 8))
    """

    needs_x = True
    gamma: Float[Tensor, " Hk"]
    log_ridge: Float[Tensor, " Hk"]

    def __init__(
        self,
        *,
        features: str = "darkformer",
        num_features: int = 256,
        share: bool = False,
        lrr: bool = True,
        gamma: Literal["raw", "softplus"] = "raw",
        ridge: float = 1.0,
        **options: Any,
    ):
        own, sizes = split_options(features, options)
        super().__init__(**sizes)
        if gamma not in ("raw", "softplus"):
            raise unknown("gamma", gamma, ["raw", "softplus"])
        if not ridge > 0:
            raise ValueError(f"ridge ({ridge}) must be positive; it is learned as exp(log_ridge)")
        if not self.causal:
            raise ValueError("linear_cubit solves its system in order and has no bidirectional form: use causal=True")
        self.share, self.lrr, self.gamma_form, self.ridge = share, lrr, gamma, ridge
        sizes_of_map = (self.num_kv_heads, self.head_dim, num_features)
        self.features = build_features(features, *sizes_of_map, **own)
        self.reference_features = None
        if not share:
            self.reference_features = build_features(features, *sizes_of_map, **own | {"seed": own.get("seed", 0) + 1})
        add_parameters(self, share=share, lrr=lrr)

    @classmethod
    def options(cls, *, features="darkformer", **chosen):
        return super().options() | feature_options(features)

    def initial_values(self):
        return start_values(self)

    def forward(self, q, k, v, *, x=None, rotate=None, mask=None, segments=None, state: State = None):
        refuse_state(self, state)
        mask, segments = marks_of_new(q.shape[2], mask, segments, state)
        q, k, v = (ops.zero_padding(t, mask) for t in (q, k, v))
        r, norm = reference(self, k, x, rotate)
        root = root_scale(self)
        if self.reference_features is not None:
            of_r, length = self.reference_features, self.head_dim**-0.25
        elif root:
            of_r, length = self.features, root  # so that rows are keys
        else:
            raise ValueError("scale (0) must be positive with share=True: rows of the system are keys at this scale")
        rows, cols = of_r.two_lengths(r, length, gamma(self, r.dtype) / (length * norm))
        o, state = ops.linear_kernel_regression(
            self.features.factored(q, root),
            rows if of_r is self.features else self.features.factored(k, root),
            rescaled(self, v, x),
            log_rows=rows,
            log_cols=cols,
            ridge=self.log_ridge.to(r.dtype).exp(),
            mask=mask,
            segments=segments,
            state=state,
        )
        return o.to(v.dtype), state
