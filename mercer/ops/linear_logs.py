"""Log features as the passes over feature space work with them: made for some tokens of some folded heads at a time."""

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


def exp_(x: Tensor) -> Tensor:
    """Exponentiate in place; on CPUs exp2 takes a third of the time of exp, and 1/40 where the result is subnormal."""
    return x.mul_(LOG2_E).exp2_()


def fold(x: Float[Tensor, "B H T d"], count: int) -> Float[Tensor, "N G T d"]:
    """Put the query heads that share one of the `count` = B Hk folded key heads beside each other."""
    return x.reshape(count, x.shape[0] * x.shape[1] // max(count, 1), *x.shape[2:])


def in_blocks(x: Float[Tensor, "N G n d"], blocks: int) -> Float[Tensor, "N b G h d"]:
    """Divide tokens into blocks, each with all heads of a group; a view."""
    return x.unflatten(2, (blocks, -1)).transpose(1, 2)


@dataclass
class Shared:
    """The product of one chunk, made by the first who reads it and kept for the others."""

    start: int = 0
    made: Float[Tensor, "N n m"] | None = None

    def read(self, logs: "Logs", span: slice) -> Float[Tensor, "N n m"]:
        """Return a stretch of it; another chunk takes its place."""
        made = self.made
        if made is None or not self.start <= span.start <= span.stop <= self.start + made.shape[1]:
            self.start, self.made = span.start, (made := logs.made(span))
        return made[:, span.start - self.start : span.stop - self.start]


@dataclass(frozen=True)
class Logs:
    """Log features of folded heads, worked out for a stretch of tokens at a time, in units of `unit` nats.

    Products come in units of log 2, which saves exp2 a pass. What is given stays in nats: it may be large, and scaling
    it before a shift of its size is taken off would cost digits.

    Attributes:
        x: the features, or what they are made of.
        weight: with it x is multiplied; None = x are the features.
        scaled: the same in units of log 2, transposed.
        factor: one number a token on x; None = 1.
        offset: one number a token added to the product; None = 0.
        square: how much of ||factor x||^2 is added to it.
        constant: what is added to all of it.
        real: True = real token, -inf elsewhere; None = all are.
        tied: whether rows are made of the same products as keys.
        shared: where products are read that others read too.
    """

    x: Float[Tensor, "N G T r"]
    weight: Float[Tensor, "N m r"] | None = None
    scaled: Float[Tensor, "N r m"] | None = None
    factor: Float[Tensor, "N T 1"] | None = None
    offset: Float[Tensor, "N T 1"] | None = None
    square: float = 0.0
    constant: float = 0.0
    real: Bool[Tensor, "N T"] | None = None
    tied: bool = False
    shared: Shared | None = None

    @classmethod
    def of(cls, x: Tensor, weight: Tensor | None, count: int, factor=None, offset=None, *, tied=False) -> "Logs":
        """Fold the heads of x [B, H, T, r], weight [Hk, m, r], factor and offset [B, Hk, T]."""
        factor, offset = (None if t is None else t.flatten(0, 1)[..., None] for t in (factor, offset))
        if weight is None:
            return cls(fold(x, count), factor=factor, offset=offset, tied=tied)
        scaled = (weight * LOG2_E).mT.contiguous()
        weight, scaled = (w.expand(len(x), -1, -1, -1).flatten(0, 1) for w in (weight, scaled))
        return cls(fold(x, count), weight, scaled, factor, offset, tied=tied)

    @property
    def unit(self) -> float:
        """How many nats the numbers are counted in."""
        return 1.0 if self.weight is None else LN_2

    def exp_(self, logs: Tensor) -> Tensor:
        """Exponentiate, in place, what is counted in units."""
        return logs.exp2_() if self.unit == LN_2 else exp_(logs)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.x.shape[2]

    @property
    def features(self) -> int:
        """Number of features."""
        return self.x.shape[3] if self.weight is None else self.weight.shape[1]

    def cut(self, span: slice, blocks: int = 1) -> Float[Tensor, "N Gn r"]:
        """Return x of a stretch: block below block, and in each head below head."""
        return in_blocks(self.x[:, :, span], blocks).flatten(1, 3)

    def product(self, span: slice, blocks: int = 1) -> Float[Tensor, "N Gn m"]:
        """Return the features of a stretch, before factor and offset; a view of x if they are given."""
        return self.made(span, blocks) if self.shared is None else self.shared.read(self, span)

    def made(self, span: slice, blocks: int = 1) -> Float[Tensor, "N Gn m"]:
        """Make the product of a stretch."""
        x = self.cut(span, blocks)
        return x if self.scaled is None else torch.bmm(x, self.scaled)

    @property
    def lends(self) -> bool:
        """Whether others need the product too, or it is a view of x, so that it must be kept."""
        return self.tied or self.shared is not None or self.weight is None

    @property
    def plain(self) -> bool:
        """Whether the features are the product itself."""
        return self.factor is None and self.offset is None and not self.square and not self.constant

    def finished(self, product: Float[Tensor, "N n m"], span: slice) -> Float[Tensor, "N n m"]:
        """Return the features of a stretch of keys, whose product this is; unless it `lends` that, it is used up."""
        own = not self.lends
        if self.factor is not None:
            product = torch.mul(product, self.factor[:, span], out=product if own else None)
            own = True
        added = self._added(span)
        if added is not None:
            product = torch.add(product, added / self.unit, out=product if own else None)
        return product if self.real is None else product.masked_fill(~self.real[:, span, None], -math.inf)

    def squares(self, span: slice) -> Float[Tensor, "N n 1"]:
        """Return ||x||^2 of a stretch of keys."""
        return self.x[:, :, span].flatten(1, 2).square().sum(-1, keepdim=True)

    def _added(self, span: slice) -> Float[Tensor, "N n 1"] | None:
        """Return what is added to all features of a token."""
        offset = None if self.offset is None else self.offset[:, span]
        if not self.square and not self.constant:
            return offset
        by_token = self.squares(span).mul_(self.square)
        if self.factor is not None:
            by_token.mul_(self.factor[:, span].square())
        by_token.add_(self.constant)
        return by_token if offset is None else by_token.add_(offset)

    def add(self, logs: Tensor, nats: Tensor, *, keep: bool = False) -> Tensor:
        """Add nats to products or features made by this; unless `keep`, in place where they are not a view of x."""
        own = self.weight is not None and not keep
        return torch.add(logs, nats / self.unit, out=logs if own else None)

    def sharing(self, shared: Shared) -> "Logs":
        """Return the same, reading its product where others read it too."""
        return replace(self, shared=shared)

    def part(self, heads: slice, span: slice, real: Bool[Tensor, "N n"] | None = None) -> "Logs":
        """Return some heads over a stretch, of which `real` are real."""
        factor, offset = (None if x is None else x[heads, span] for x in (self.factor, self.offset))
        weight, scaled = (None if x is None else x[heads] for x in (self.weight, self.scaled))
        return replace(
            self, x=self.x[heads, :, span], weight=weight, scaled=scaled, factor=factor, offset=offset, real=real
        )


@dataclass(frozen=True)
class LogGradients:
    """Where the gradients of folded log features are written: those of x, and added up those of the weight."""

    x: Float[Tensor, "N G T r"]
    weight: Float[Tensor, "N m r"] | None = None

    @classmethod
    def like(cls, x: Tensor, weight: Tensor | None, count: int, *, weigh: bool = True) -> "LogGradients":
        """Return room for the gradients of an operator's arguments; without `weigh` not for that of the weight."""
        room = weight.new_zeros(count, *weight.shape[1:]) if weight is not None and weigh else None
        return cls(fold(torch.empty_like(x, memory_format=torch.contiguous_format), count), room)

    def part(self, heads: slice, span: slice) -> "LogGradients":
        """Return the room of some heads over a stretch."""
        return LogGradients(self.x[heads, :, span], None if self.weight is None else self.weight[heads])

    def put(
        self,
        logs: Logs,
        span: slice,
        grad: Float[Tensor, "N Gn m"],
        blocks: int = 1,
        of_square: Float[Tensor, "N Gn 1"] | None = None,
    ) -> None:
        """Take the gradient of the product of a stretch.

        `of_square` is that of ||x||^2; by default that of what `logs` adds of it to the product, without a factor.
        """
        x, room = logs.cut(span, blocks), in_blocks(self.x[:, :, span], blocks)
        of_square = _of_square(logs, grad) if of_square is None else of_square
        whole = room.shape[2] == 1 and logs.weight is not None  # one head a key: x lies as the product does
        out = self.x[:, 0, span] if whole else None
        of_x = grad if logs.weight is None else torch.bmm(grad, logs.weight, out=out)
        if of_square is not None:
            of_x.addcmul_(x, of_square, value=2)
        if out is None:
            room.copy_(of_x.view(room.shape))
        if self.weight is not None:
            self.weight.baddbmm_(grad.mT, x)

    def results(self, like: Tensor, weight: Tensor | None) -> list[Tensor]:
        """Return the gradients of x, shaped like it, and of the weight, if there is one: zeros if it was not wanted."""
        x = self.x.reshape(like.shape)
        if weight is None:
            return [x]
        by_head = self.weight
        return [
            x,
            torch.zeros_like(weight) if by_head is None else by_head.unflatten(0, (len(like), len(weight))).sum(0),
        ]


@dataclass
class SharedGradients:
    """Gradients of a `Shared` product, added up over a chunk before they go through the weight."""

    into: LogGradients
    parts: list[tuple[slice, Tensor]] = field(default_factory=list)
    squares: list[tuple[slice, Tensor]] = field(default_factory=list)

    def part(self, heads: slice, span: slice) -> "SharedGradients":
        """Return the room of some heads over a stretch, with nothing in it yet."""
        return SharedGradients(self.into.part(heads, span))

    def put(
        self,
        logs: Logs,
        span: slice,
        grad: Float[Tensor, "N n m"],
        blocks: int = 1,
        of_square: Float[Tensor, "N n 1"] | None = None,
    ) -> None:
        """Take what one reader hands back of a stretch, as `LogGradients` does; it may be used up."""
        self.parts.append((span, grad))
        of_square = _of_square(logs, grad) if of_square is None else of_square
        if of_square is not None:
            self.squares.append((span, of_square))

    def hand_on(self, keys: Logs) -> None:
        """Write the gradient of the chunk that all readers are through with."""
        chunk = slice(min(span.start for span, _ in self.parts), max(span.stop for span, _ in self.parts))
        total = _added_up(self.parts, chunk)
        squares = _added_up(self.squares, chunk) if self.squares else None
        self.into.put(replace(keys, square=0.0), chunk, total, of_square=squares)
        self.parts.clear()
        self.squares.clear()


def _of_square(logs: Logs, grad: Float[Tensor, "N n m"]) -> Float[Tensor, "N n 1"] | None:
    """Return the gradient of ||x||^2 from that of features it was added to."""
    return grad.sum(-1, keepdim=True).mul_(logs.square) if logs.square else None


def _added_up(parts: list[tuple[slice, Tensor]], chunk: slice) -> Float[Tensor, "N n d"]:
    """Add stretches up that together cover a chunk; the first may be used up."""
    (span, total), *others = parts
    if span != chunk:
        total, others = total.new_zeros(total.shape[0], chunk.stop - chunk.start, total.shape[2]), parts
    for span, part in others:
        total[:, span.start - chunk.start : span.stop - chunk.start] += part
    return total
