"""Where tokens stand for attention that is exact near by: padding taken out, positions counted within documents.

Real tokens are moved together to the left, in order, so that a distance in real tokens is a difference of indices. What
then decides whether key j is near query i is one number a row: the index at which the document of i starts, negative
where it started before this call.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.linear_chunks import _refuse_returning


@dataclass(frozen=True)
class Layout:
    """The new tokens of a batch in their compact order.

    Attributes:
        order: token at a compact index; None: no token is padding.
        place: compact index of a token.
        real: whether a compact index holds a real token; those come first.
        start: compact index of the first token of the index's document.
        run: number of that document, 0 = the state's; None: there is one.
        count: real tokens of a row.
        seen: tokens of its last document so far, earlier calls included.
        segment: the last document.
    """

    order: Int[Tensor, "B T"] | None
    place: Int[Tensor, "B T"] | None
    real: Bool[Tensor, "B T"]
    start: Int[Tensor, "B T"]
    run: Int[Tensor, "B T"] | None
    count: Int[Tensor, " B"]
    seen: Int[Tensor, " B"]
    segment: Int[Tensor, " B"]

    @classmethod
    def of(cls, length: int, mask: Tensor | None, segments: Tensor | None, seen: Tensor, segment: Tensor) -> "Layout":
        """Lay out `length` tokens after `seen` ones of document `segment`."""
        order, place, count = None, None, torch.full_like(seen, length)
        if mask is not None:
            order, place = torch.argsort(~mask, dim=1, stable=True), (mask.cumsum(1) - 1).clamp_min(0)
            count = mask.sum(1)
        real = torch.arange(length, device=seen.device) < count[:, None]
        if segments is None:
            start, run = (-seen)[:, None].expand(-1, length), None
            return cls(order, place, real, start, run, count, seen + count, segment)
        documents = (segments if order is None else segments.gather(1, order)).long()
        start, run = document_starts(documents, real, seen, segment)
        last = (count - 1).clamp_min(0)[:, None]
        after = torch.where(count > 0, count - start.gather(1, last)[:, 0], seen)
        segment = torch.where(count > 0, documents.gather(1, last)[:, 0], segment)
        return cls(order, place, real, start, run, count, after, segment)

    def compact(self, x: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T d"]:
        """Move the real tokens together."""
        return x if self.order is None else _at(x, self.order)

    def spread(self, x: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T d"]:
        """Move them back, padded tokens repeating one."""
        return x if self.place is None else _at(x, self.place)

    def far_rows(self, distance: int) -> Bool[Tensor, "B T"]:
        """Return which rows stand at least `distance` tokens after the start of their document."""
        return self.real & (torch.arange(self.real.shape[1], device=self.real.device) - self.start >= distance)


def gather_sinks(
    x: Float[Tensor, "B H L d"], start: Int[Tensor, "B N"], window: int, sinks: int
) -> Float[Tensor, "B H M d"]:
    """Take the first tokens of documents out of [sinks of the state, its window, new tokens], M = N sinks.

    `start` says where the documents start, as in `Layout`; what a document does not have yet is any token.
    """
    position = torch.arange(sinks, device=x.device)
    index = start[..., None] + position
    index = torch.where(index < 0, position, index + sinks + window)  # of the state, or of this call
    return _at(x, index.clamp_max(x.shape[2] - 1).flatten(1))


def _at(x: Float[Tensor, "B H L d"], index: Int[Tensor, "B M"]) -> Float[Tensor, "B H M d"]:
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def take_last(x: Float[Tensor, "B H L d"], layout: Layout, skip: int, window: int) -> Float[Tensor, "B H W d"]:
    """Return the `window` tokens before the end of `x`, `skip` others and a window before the new ones at its head."""
    if layout.order is None:
        return x[:, :, x.shape[2] - window :]
    return _at(x, layout.count[:, None] + skip + torch.arange(window, device=x.device))


@torch.library.custom_op("mercer::document_starts", mutates_args=())
def document_starts(documents: Tensor, real: Tensor, seen: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return start and run of `Layout`. An operator of its own, because refusing a document needs its values."""
    before = torch.cat([last[:, None].to(documents.dtype), documents], 1)[:, :-1]
    begins = (documents != before) & real
    _refuse_returning(documents, begins, last, seen > 0)
    latest = torch.where(begins, torch.arange(documents.shape[1], device=documents.device), -1).cummax(1).values
    return torch.where(latest >= 0, latest, -seen[:, None]), begins.cumsum(1)


@document_starts.register_fake
def _(documents, real, seen, last):
    return torch.empty_like(documents), torch.empty_like(documents)
