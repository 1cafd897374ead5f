"""Text to token ids, with the number of bytes that every token stands for."""

import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from mercer.data.tokenizer import byte_letters

if TYPE_CHECKING:
    import transformers

PIECE_CHARACTERS = 2**20  # a tokenizer needs some 100 bytes a token while it works: longer documents go in pieces
WORD_CHARACTERS = 2**23  # how much text the table of words may hold before it starts afresh
# A line with the white space before it. No word of the byte-level pre-tokenizer goes on into white space, so none
# crosses from one of these to the next. (Python counts four control characters as white space, Unicode does not.)
_LINES = re.compile(r"[^\S\x1c-\x1f]*+(?:[^\n]*[\S\x1c-\x1f])?")
# What the byte-level pre-tokenizer splits at, for ASCII only: there `re` and its engine agree on every class.
_ASCII_WORDS = re.compile(
    r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
    re.ASCII,
)


class Encoder:
    """Encode text with a fast tokenizer: text stays text (a written "<|eos|>" is five letters), no specials added.

    Three ways to the same ids: bytes as they are for the byte tokenizer; a table of the words seen for plain
    byte-level BPE, five times faster than the tokenizer itself; the tokenizer for all else.

    Args:
        tokenizer: a fast transformers tokenizer.

    Raises:
        ValueError: the tokenizer is not a fast one.

    >>> from mercer.data import build_tokenizer
    >>> Encoder(build_tokenizer("byte")).encode(["né"])
    [(array([110, 195, 169]), array([1, 1, 1]))]
    """

    def __init__(self, tokenizer: "transformers.PreTrainedTokenizerFast"):
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ValueError(f"{type(tokenizer).__name__} is a slow tokenizer; save it as a fast one (tokenizer.json)")
        described = tokenizer.backend_tokenizer.to_str()
        # A copy: the caller's tokenizer goes on reading specials, cutting and padding as it was told to.
        backend = type(tokenizer.backend_tokenizer).from_str(described)
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._words: dict[str, tuple[int, ...]] = {}
        self._held = 0
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.fingerprint = f"{described}\0{self.bos}\0{self.eos}"
        vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        structure = json.loads(described)
        self._byte_counts = _byte_counts(structure, vocab, self.vocab_size)
        plain = structure["model"]["type"] == "BPE" and _is_plain_byte_level(structure)
        letters = {letter: byte for byte, letter in enumerate(byte_letters())}
        self._is_bytes = plain and not structure["model"]["merges"] and letters.items() <= vocab.items()
        self._is_words = plain and structure["pre_tokenizer"]["use_regex"]

    def encode(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return, for every text, its token ids and the bytes each stands for; those add up to the whole text.

        A character that several tokens share belongs to them byte by byte where the tokenizer works on bytes, and
        to the first of them elsewhere; what a tokenizer drops (spaces, say) belongs to the token after it. A text
        of which nothing is left has no tokens.

        Args:
            texts: documents; the tokenizer works on all of them at once, on every core.

        Returns:
            Pairs (ids, byte counts) of int64 arrays.
        """
        if self._is_bytes:
            arrays = [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
            return [(ids, np.ones_like(ids)) for ids in arrays]
        pieces = [_pieces(text) for text in texts]
        encoded = iter(self._encode_pieces([piece for parts in pieces for piece in parts]))
        results = []
        for text, parts in zip(texts, pieces, strict=True):
            ids, counts = map(np.concatenate, zip(*itertools.islice(encoded, len(parts)), strict=True))
            if len(counts):
                counts[-1] += len(text.encode()) - counts.sum()
            results.append((ids, counts))
        return results

    def _encode_pieces(self, pieces: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        if self._is_words:
            encoded = [self._encode_words(piece) for piece in pieces]
        else:
            encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
            encoded = [np.array(encoding.ids, np.int64) for encoding in encodings]
        return [(ids, self._counts(piece, ids)) for piece, ids in zip(pieces, encoded, strict=True)]

    def _counts(self, text: str, ids: np.ndarray) -> np.ndarray:
        if self._byte_counts is not None:
            counts = self._byte_counts[ids]
            if counts.sum() == len(text.encode()):
                return counts
        return self._counts_from_offsets(text)

    def _encode_words(self, text: str) -> np.ndarray:
        words: list[str] = []
        for line in _LINES.findall(text):
            if line.isascii():
                words += _ASCII_WORDS.findall(line)
            else:
                words.append(line)  # the tokenizer splits these itself
        if self._held > WORD_CHARACTERS:
            self._words.clear()
            self._held = 0
        new = [word for word in dict.fromkeys(words) if word not in self._words]
        for word, encoding in zip(new, self._backend.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self._words[word] = tuple(encoding.ids)
        self._held += sum(map(len, new))
        return np.fromiter(itertools.chain.from_iterable(map(self._words.__getitem__, words)), np.int64)

    def _counts_from_offsets(self, text: str) -> np.ndarray:
        encoding = self._backend.encode(text, add_special_tokens=False)
        ends = np.array([end for _, end in encoding.offsets], np.int64)
        characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (characters >= 0x80).astype(np.int64) + (characters >= 0x800) + (characters >= 0x10000)
        bytes_before = np.concatenate([[0], np.cumsum(widths)])
        return np.diff(bytes_before[np.maximum.accumulate(ends)], prepend=0) if len(ends) else ends


def _pieces(text: str) -> list[str]:
    """Cut a long text behind the last line end in each stretch, where a cut changes the tokens least."""
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARACTERS:
        cut = text.rfind("\n", start + 1, start + PIECE_CHARACTERS) + 1
        cut = cut or start + PIECE_CHARACTERS
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


def _byte_counts(structure: dict[str, Any], vocab: dict[str, int], vocab_size: int) -> np.ndarray | None:
    """Return how many bytes each token of a byte-level vocabulary spells; None for the other kinds."""
    decoder = structure["decoder"] or {}
    if "ByteLevel" not in (part["type"] for part in decoder.get("decoders", [decoder]) if part):
        return None
    counts = np.zeros(vocab_size, np.int64)
    for token, number in vocab.items():
        counts[number] = len(token)
    for added in structure["added_tokens"]:  # spelled in plain text, not in byte letters
        counts[added["id"]] = len(added["content"].encode())
    return counts


def _is_plain_byte_level(structure: dict[str, Any]) -> bool:
    pre_tokenizer = structure["pre_tokenizer"] or {}
    return (
        pre_tokenizer.get("type") == "ByteLevel"
        and not pre_tokenizer["add_prefix_space"]
        and structure["normalizer"] is None
        and all(added["special"] for added in structure["added_tokens"])
        and not structure["model"].get("dropout")
    )
