"""The quadratic definition of feature-space weights, which the definitions of the linear operators share."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.checks import compute_dtype, repeat_heads
from mercer.ops.linear_chunks import FLOOR, document_ids


@dataclass(frozen=True)
class Sums:
    """The sums of a past, counted at a log scale of each feature.

    Attributes:
        sums: S and, as a last column, z: W = Dv + 1.
        c: log scale of both, -1e30 where there is no key yet.
        segment: the document the sums belong to; 0 where no segments were given.
    """

    sums: Float[Tensor, "B H m W"]
    c: Float[Tensor, "B H m"]
    segment: Int[Tensor, " B"]

    @property
    def S(self) -> Float[Tensor, "B H m Dv"]:
        """Sums of weighted values."""
        return self.sums[..., :-1]

    @property
    def z(self) -> Float[Tensor, "B H m"]:
        """Sums of weights."""
        return self.sums[..., -1]

    @classmethod
    def of(cls, state: "Sums | None", log_k: Tensor, v: Tensor, *others: Tensor) -> "Sums":
        """Return those of a state in the dtype of the arithmetic, or none at all; `log_k` and `v` give the shapes."""
        dtype = compute_dtype(log_k, v, *others)
        if state is not None:
            return cls(sums=state.sums.to(dtype), c=state.c.detach().to(dtype), segment=state.segment)
        batch, heads, _, features = log_k.shape
        sums = log_k.new_zeros(batch, heads, features, v.shape[3] + 1, dtype=dtype)
        segment = torch.zeros(batch, dtype=torch.long, device=log_k.device)
        return cls(sums=sums, c=torch.full_like(sums[..., 0], FLOOR), segment=segment)


@dataclass(frozen=True)
class Definition:
    """Weights w_ij = sum_f exp(log_q_if + log_k_jf) of the keys that a row sees, past and new.

    Attributes:
        past: what came before.
        keys: log features of the new keys, FLOOR where padded.
        real: which of them are real tokens.
        documents: the document of each; None: one.
        same: whether rows and keys are the same tokens.
        causal: whether a row sees only its past.
    """

    past: Sums
    keys: Float[Tensor, "B Hk S m"]
    real: Bool[Tensor, "B S"]
    documents: Int[Tensor, "B S"] | None
    same: bool
    causal: bool

    @classmethod
    def of(cls, log_k: Tensor, mask, segments, past: Sums, *, same: bool = True, causal: bool = True) -> "Definition":
        """Hide the padded keys and give padded tokens a document."""
        real = torch.ones_like(log_k[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
        keys = log_k.to(past.sums.dtype).masked_fill(~real[:, None, :, None], FLOOR).clamp_min(FLOOR)
        return cls(past, keys, real, document_ids(mask, segments, past.segment), same, causal)

    def visible(self, rows: int) -> tuple[Bool[Tensor, "B 1 T S"], Bool[Tensor, "B 1 T 1"]]:
        """Return which new keys, and whether the past's, a row sees; padded rows see nothing."""
        visible = self.real[:, None, :].expand(-1, rows, -1)
        continues = torch.ones_like(visible[..., :1]) if rows else visible.new_ones(self.real.shape[0], 0, 1)
        if self.same:
            continues = continues & self.real[:, :, None]
            visible = visible & self.real[:, :, None]
        if self.causal:
            visible = visible.tril()
        if self.documents is not None:
            visible = visible & (self.documents[:, :, None] == self.documents[:, None, :])
            continues = continues & (self.documents == self.past.segment[:, None])[..., None]
        return visible[:, None], continues[:, None]

    def weights(
        self, log_q: Float[Tensor, "B H T m"]
    ) -> tuple[Float[Tensor, "B H T S"], Float[Tensor, "B H T m"], Float[Tensor, "B H T 1"]]:
        """Return the weights of the new keys, those of the features of the past, and their total, up to a factor a row.

        The total is 1 where a row sees nothing: all its weights are 0.
        """
        rows, heads = log_q.to(self.keys.dtype), log_q.shape[1]
        if self.same:
            rows = rows.masked_fill(~self.real[:, None, :, None], 0)
        rows = rows.clamp_min(FLOOR)
        visible, continues = self.visible(rows.shape[2])
        keys, z, c = (repeat_heads(x, heads) for x in (self.keys, self.past.z, self.past.c))
        logits = torch.logsumexp(rows[..., :, None, :] + keys[..., None, :, :], -1).masked_fill(~visible, -math.inf)
        before = (rows + c[:, :, None]).masked_fill(~continues, -math.inf)
        shift = torch.cat([logits, before], -1).detach().amax(-1, keepdim=True).clamp_min(FLOOR)
        weights, before = (torch.exp(x - shift).masked_fill(x < FLOOR / 2, 0) for x in (logits, before))
        total = weights.sum(-1, keepdim=True) + before @ z[..., None]
        return weights, before, total.masked_fill(total == 0, 1)

    def sums_after(self, values: Float[Tensor, "B Hk S Dv"]) -> Sums:
        """Return the sums over the past and the new keys of the last document."""
        past, segment, kept = self.past, self.past.segment, self.real
        if self.documents is not None and self.documents.shape[1]:
            segment = self.documents[:, -1].to(segment.dtype)
            kept = kept & (self.documents == segment[:, None])
        goes_on = (segment == past.segment)[:, None, None]
        keys = self.keys.masked_fill(~kept[:, None, :, None], FLOOR)
        before = torch.where(goes_on, past.c, FLOOR)
        c = torch.cat([before[:, :, None], keys], 2).amax(2).detach()
        weights = torch.exp(keys - c[:, :, None]).masked_fill(keys <= FLOOR, 0)
        decay = (torch.exp(before - c) * goes_on)[..., None]
        sums = decay * past.sums + weights.mT @ torch.cat([values, torch.ones_like(values[..., :1])], -1)
        return Sums(sums=sums, c=c, segment=segment)


def segment_after(documents: Int[Tensor, "B S"] | None, past: Sums) -> Int[Tensor, " B"]:
    """Return the document of the last token."""
    if documents is None or not documents.shape[1]:
        return past.segment
    return documents[:, -1].to(past.segment.dtype)
