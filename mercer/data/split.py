"""Hold whole documents out for validation."""

import numpy as np

from mercer.data.stream import TokenStream
from mercer.errors import DataError


def split_documents(
    digests: np.ndarray, sizes: np.ndarray, tokens: np.ndarray, *, fraction: float, least: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Choose the documents of the training and of the validation split.

    Documents go to validation in the order of their hashes, equal documents together, until it holds the asked
    share of the text; one that alone is more than twice that share stays in training, unless validation would
    otherwise be too small. So the choice depends on the texts: not on their order, on a seed or, where there is
    enough text, on the tokenizer.

    Args:
        digests: a hash of each document [documents].
        sizes: bytes of each document [documents].
        tokens: tokens of each document [documents].
        fraction: share of the bytes wanted for validation.
        least: tokens that each side needs.

    Returns:
        Indices of the training and of the validation documents, each in order; None where no choice of whole
        documents was found that gives both sides `least` tokens.

    >>> sizes = np.array([50, 50, 50, 50])
    >>> split_documents(np.array([7, 3, 7, 5], np.uint64), sizes, sizes, fraction=0.25, least=10)
    (array([0, 2, 3]), array([1]))
    """
    _, group = np.unique(digests, return_inverse=True)  # groups are numbered in the order of their hashes
    group_sizes = np.bincount(group, weights=sizes).astype(np.int64)
    group_tokens = np.bincount(group, weights=tokens).astype(np.int64)
    wanted = fraction * group_sizes.sum()
    candidates = np.flatnonzero((group_sizes <= 2 * wanted) | (group_tokens <= 2 * least))
    lacking = (np.cumsum(group_sizes[candidates]) < wanted) | (np.cumsum(group_tokens[candidates]) < least)
    chosen = np.zeros(len(group_sizes), bool)
    chosen[candidates[: int(lacking.sum()) + 1]] = True
    if group_tokens[chosen].sum() < least and not chosen.all():
        large = np.flatnonzero(~chosen)
        chosen[large[np.argmin(group_tokens[large])]] = True
    held_out = int(group_tokens[chosen].sum())
    if held_out < least or group_tokens.sum() - held_out < least:
        return None
    return np.flatnonzero(~chosen[group]), np.flatnonzero(chosen[group])


def split_spans(name: str, stream: TokenStream, *, fraction: float, least: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the spans of the token stream that make up each split, and a note on what was unusual.

    Where whole documents cannot be held out (a corpus of one book), the largest document is cut in two and its
    end is the validation split.

    Args:
        name: the source, for messages.
        stream: the tokens of all documents.
        fraction: share of the text wanted for validation.
        least: tokens that each side needs.

    Returns:
        Training spans [n, 2], validation spans [m, 2] (start and stop in the stream), and the note, mostly empty.

    Raises:
        DataError: there is not enough text for a window on each side.
    """
    digests, spans = stream.digests, stream.spans()
    sizes = spans[:, 1] - spans[:, 0]
    chosen = split_documents(digests, stream.document_bytes, sizes, fraction=fraction, least=least)
    if chosen is not None:
        train, validation = chosen
        return spans[train], spans[validation], ""
    total, largest = int(sizes.sum()), int(np.argmax(sizes))
    if total < 2 * least:
        raise DataError(
            f"{name} is too short: {total} tokens, where training and validation each need one window of {least}; "
            f"give more text, or windows of at most {total // 2} tokens"
        )
    tail = max(least, round(fraction * int(sizes[largest])))
    repeated = int((digests == digests[largest]).sum()) > 1
    if repeated or tail >= sizes[largest] or total - tail < least:
        raise DataError(
            f"{name} cannot be split: among its {len(sizes)} documents no choice leaves training and validation one "
            f"window of {least} tokens each; give more documents, or shorter windows"
        )
    stop = int(spans[largest, 1])
    train = spans.copy()
    train[largest, 1] = stop - tail
    note = f"no whole document could be held out: the validation split is the last {tail} tokens of the largest one"
    return train, np.array([[stop - tail, stop]]), note
