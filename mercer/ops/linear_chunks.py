"""How a sequence is cut into pieces whose shared scale is safe, for the chunked operators of feature space.

A piece of a sequence is worked with one shift per feature: its largest log feature, everything before it included. A
row early in the piece may see only much smaller keys. The *spread* of a piece is how far, in nats, the shift lies above
what some row sees; below a limit nothing underflows and the shift cancels to rounding. A chunk whose spread is too
large (a key 120 nats above the others) is halved until every piece is safe; a piece of one token always is.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mercer.ops.linear_logs import Logs, exp_

FLOOR = -1e30  # the log scale of "no key yet": finite, so that FLOOR - FLOOR is 0 and never NaN
CACHE_BYTES = 1 << 21  # query and key features of one chunk of the heads worked together: a second-level cache
CPU_CHUNK = 256  # tokens that share one shift on a CPU, at most


def chunk_length(device: torch.device, chunk_size: int) -> int:
    """Return how many tokens to work together when at most `chunk_size` are allowed."""
    return min(chunk_size, CPU_CHUNK) if device.type == "cpu" else chunk_size


@torch.compiler.assume_constant_result
def num_threads() -> int:
    """Return the threads there are; graphs that are compiled keep the number."""
    return torch.get_num_threads()


def heads_at_once(device: torch.device, heads: int, row_bytes: int, threads: int) -> int:
    """Return how many heads to work together: all on an accelerator, few enough for the caches on a CPU."""
    if device.type != "cpu":
        return max(heads, 1)
    fitting = max(1, CACHE_BYTES // max(row_bytes, 1))
    return max(1, min(heads, fitting * threads))


def document_ids(
    mask: Bool[Tensor, "B T"] | None, segments: Int[Tensor, "B T"] | None, last: Int[Tensor, " B"]
) -> Int[Tensor, "B T"] | None:
    """Return the segments with every padded token put into the document of the real token before it."""
    if segments is None or mask is None:
        return segments
    place = torch.arange(segments.shape[1], device=segments.device)
    latest = torch.where(mask, place, -1).cummax(1).values
    return torch.where(latest >= 0, segments.gather(1, latest.clamp_min(0)), last[:, None].to(segments.dtype))


@dataclass(frozen=True)
class Tokens:
    """What is known about the tokens of a batch besides their features, once per folded head.

    Attributes:
        real: True = real token; None = all are.
        seen: True where the row has at least one key to see; None = everywhere.
        first: True at the first real key of a document, unless a state continues it; None = only ever token 0.
        runs: number of the document a token belongs to, 0 = the one the state belongs to; None = one document.
        edges: positions at which some row of the batch begins a new document.
    """

    real: Tensor | None = None
    seen: Tensor | None = None
    first: Tensor | None = None
    runs: Tensor | None = None
    edges: tuple[int, ...] = ()

    def of_heads(self, start: int, stop: int) -> "Tokens":
        """Return the same for some of the folded heads."""
        cut = [None if x is None else x[start:stop] for x in (self.real, self.seen, self.first, self.runs)]
        return Tokens(*cut, edges=self.edges)


def tokens_of(
    mask: Bool[Tensor, "B T"] | None,
    documents: Int[Tensor, "B T"] | None,
    last: Int[Tensor, " B"],
    occupied: Bool[Tensor, " B"],
    heads: int,
) -> Tokens:
    """Describe the tokens of a batch, each row repeated for its `heads`.

    Args:
        mask: True = real token.
        documents: what `document_ids` returned.
        last: the document the state belongs to.
        occupied: whether the state holds any key.
        heads: folded heads of a batch row.

    Raises:
        ValueError: a segment comes back after another one.
    """
    if mask is not None:
        real = mask
    elif documents is not None:
        real = torch.ones_like(documents, dtype=torch.bool)
    else:
        return Tokens()
    any_before = occupied[:, None] | (real.cumsum(1) > 0)
    first = real & (real.cumsum(1) == 1) & ~occupied[:, None]
    runs, edges = None, ()
    if documents is not None:
        before = torch.cat([last[:, None].to(documents.dtype), documents], 1)[:, :-1]
        begins = documents != before
        first = first | begins
        runs = begins.cumsum(1)
        edges = tuple(begins.any(0).nonzero().flatten().tolist())
        _refuse_returning(documents, begins, last, occupied)
    fold = [None if x is None else x.repeat_interleave(heads, 0) for x in (mask, any_before, first, runs)]
    return Tokens(*fold, edges=edges)


def _refuse_returning(documents: Tensor, begins: Tensor, last: Tensor, occupied: Tensor) -> None:
    """Carried sums forget a document when the next begins, so none may come back."""
    if not documents.shape[1]:
        return
    goes_on = occupied | ~begins[:, 0]
    ids = torch.cat([torch.where(goes_on, last, documents[:, 0])[:, None], documents], 1)
    ordered = ids.sort(1).values
    distinct = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)
    returning = (goes_on + begins.sum(1) > distinct).nonzero().flatten().tolist()
    if returning:
        row = returning[0]
        begun = ids[row][torch.cat([goes_on[:, None], begins], 1)[row]].tolist()
        raise ValueError(
            f"segments: document {next(i for i in begun if begun.count(i) > 1)} of batch row {row} comes back after "
            "another one; each packed document must be one run of tokens: give the later part an id of its own"
        )


@dataclass(frozen=True)
class Documents:
    """Which tokens of a piece belong together.

    Attributes:
        same: query i and key j are of one document.
        opening: rows of the document the entering sums belong to.
        closing: keys of the document the leaving sums belong to.
        through: whether both are one document.
    """

    same: Bool[Tensor, "N n n"]
    opening: Bool[Tensor, "N n 1"]
    closing: Bool[Tensor, "N n 1"]
    through: Bool[Tensor, "N 1 1"]


def documents_of(tokens: Tokens, start: int, stop: int) -> Documents | None:
    """Describe how documents divide the piece [start, stop); None if none begins inside."""
    if tokens.runs is None or not any(start <= edge < stop for edge in tokens.edges):
        return None
    runs = tokens.runs[:, start:stop]
    before = tokens.runs[:, start - 1 : start] if start else torch.zeros_like(runs[:, :1])
    after = runs[:, -1:]
    return Documents(
        same=runs[:, :, None] == runs[:, None, :],
        opening=(runs == before)[..., None],
        closing=(runs == after)[..., None],
        through=(before == after)[..., None],
    )


@dataclass(frozen=True)
class Piece:
    """Tokens worked together.

    Attributes:
        start: first token.
        stop: one past the last token.
        carry: log scale of the sums that enter, FLOOR where they belong to an earlier document.
        shift: log scale of the features inside.
        scale: log scale of the sums that leave.
        parts: how documents divide it; None where none begins inside, in any row of the batch.
        logs: its keys' log features, in units of `Logs`, where they are at hand; to be used once, and used up.
        product: what they are made of, likewise, where rows are made of it too.
    """

    start: int
    stop: int
    carry: Float[Tensor, "N m"]
    shift: Float[Tensor, "N m"]
    scale: Float[Tensor, "N m"]
    parts: Documents | None
    logs: Float[Tensor, "N n m"] | None = None
    product: Float[Tensor, "N n m"] | None = None

    @property
    def span(self) -> slice:
        """Its tokens."""
        return slice(self.start, self.stop)

    def without_logs(self) -> "Piece":
        """Return the piece without what takes memory."""
        return replace(self, product=None, logs=None)

    @property
    def decay(self) -> Float[Tensor, "N 1 m"]:
        """What the entering sums are multiplied by to stand at `shift`."""
        return exp_(self.carry - self.shift)[:, None]

    @property
    def lift(self) -> Float[Tensor, "N 1 m"]:
        """What sums at `shift` are multiplied by to leave at `scale`."""
        return exp_(self.shift - self.scale)[:, None]


def _measure(log_k: Logs, tokens: Tokens, start: int, stop: int, scale: Float[Tensor, "N m"]) -> tuple[Piece, Tensor]:
    """Return the piece [start, stop) after sums at `scale`, and its spread in nats."""
    span = slice(start, stop)
    product = log_k.product(span)
    keys = log_k.finished(product, span)
    parts = documents_of(tokens, start, stop)
    if parts is not None:
        scale = torch.where(parts.opening[:, 0], scale, FLOOR)
    shift = torch.maximum(scale, keys.amax(1) * log_k.unit)
    lowest = torch.maximum(scale, keys[:, 0] * log_k.unit)
    if tokens.seen is not None and tokens.first is not None:
        lowest = torch.where(tokens.seen[:, start, None], lowest, math.inf)
        begun = keys.masked_fill(~tokens.first[:, span, None], math.inf).amin(1) * log_k.unit
        lowest = torch.minimum(lowest, begun.to(scale.dtype).clamp_min(FLOOR))  # which float16 cannot hold
    out = shift
    if parts is not None:
        out = keys.masked_fill(~parts.closing, -math.inf).amax(1) * log_k.unit
        out = torch.maximum(torch.where(parts.through[..., 0], scale, FLOOR), out)
    piece = Piece(start, stop, scale, shift, out, parts, keys, product if log_k.tied else None)
    return piece, (shift - lowest).amax()


def _halve(
    log_k: Logs, tokens: Tokens, start: int, stop: int, scale: Float[Tensor, "N m"], limit: float
) -> Iterator[Piece]:
    """Yield safe pieces that together are [start, stop)."""
    piece, spread = _measure(log_k, tokens, start, stop, scale)
    if stop - start == 1 or not float(spread) > limit:
        yield piece
        return
    middle = (start + stop) // 2
    for piece in _halve(log_k, tokens, start, middle, scale, limit):
        yield piece
        scale = piece.scale
    yield from _halve(log_k, tokens, middle, stop, scale, limit)


def plan(log_k: Logs, scale: Float[Tensor, "N m"], tokens: Tokens, chunk_size: int) -> Iterable[list[Piece]]:
    """Cut the sequence into chunks, and each chunk into safe pieces: one piece a chunk unless its spread is too large.

    On a CPU chunks are cut as they are asked for, so that what was read to cut one is in the cache when it is worked.
    Of an accelerator, all are cut at once, and it is waited for once, for the spreads of all chunks.
    """
    cut = _cut_in_turn if scale.device.type == "cpu" else _cut_at_once
    return cut(log_k, scale, tokens, chunk_size, _limit(scale))


def plan_backwards(
    log_k: Logs, scales: Float[Tensor, "N chunks m"], tokens: Tokens, chunk_size: int
) -> Iterator[tuple[int, list[Piece]]]:
    """Cut the sequence as `plan` did, from the last chunk to the first, given the scale each was entered with."""
    count = scales.shape[1]
    if scales.device.type != "cpu" and count:
        chunks = _cut_at_once(log_k, scales[:, 0], tokens, chunk_size, _limit(scales))
        yield from zip(range(count - 1, -1, -1), reversed(chunks), strict=True)
        return
    for number in range(count - 1, -1, -1):
        start = number * chunk_size
        stop = min(start + chunk_size, log_k.length)
        yield number, list(_halve(log_k, tokens, start, stop, scales[:, number], _limit(scales)))


def _limit(scale: Tensor) -> float:
    """Return the largest spread that is safe: 52 nats in float32, 425 in float64."""
    return -0.6 * math.log(torch.finfo(scale.dtype).tiny)


def _cut_in_turn(
    log_k: Logs, scale: Float[Tensor, "N m"], tokens: Tokens, chunk_size: int, limit: float
) -> Iterator[list[Piece]]:
    for start in range(0, log_k.length, chunk_size):
        pieces = list(_halve(log_k, tokens, start, min(start + chunk_size, log_k.length), scale, limit))
        yield pieces
        scale = pieces[-1].scale


def _cut_at_once(
    log_k: Logs, scale: Float[Tensor, "N m"], tokens: Tokens, chunk_size: int, limit: float
) -> list[list[Piece]]:
    chunks, spreads = [], []
    for start in range(0, log_k.length, chunk_size):
        piece, spread = _measure(log_k, tokens, start, min(start + chunk_size, log_k.length), scale)
        chunks.append([piece.without_logs()])
        spreads.append(spread)
        scale = piece.scale
    if log_k.length <= 1:  # decoding: one token is always safe, and nothing is waited for
        return chunks
    for number, spread in enumerate(torch.stack(spreads).tolist()):
        if spread > limit:
            whole = chunks[number][0]
            entering = chunks[number - 1][-1].scale if number else None
            entering = whole.carry if entering is None else entering
            halves = _halve(log_k, tokens, whole.start, whole.stop, entering, limit)
            chunks[number] = [piece.without_logs() for piece in halves]
    return chunks
