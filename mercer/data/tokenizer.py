"""Tokenizers: bytes as they are, a byte-level BPE trained on the corpus, or a pretrained one from a folder."""

import hashlib
import heapq
import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mercer.data.packages import require
from mercer.errors import DataError

if TYPE_CHECKING:
    import transformers

SPECIALS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
SAMPLE_BYTES = 8 * 2**20  # training cost is linear in it and the merges of a 4k vocabulary have long settled
READ_BYTES = 8 * SAMPLE_BYTES  # how far into a source the sample may reach
PIECE_CHARACTERS = 2**14


def byte_letters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level vocabularies.

    A byte that is a visible Latin-1 character stands for itself; the n-th of the others is character 256 + n.

    >>> byte_letters()[ord("A")], byte_letters()[ord(" ")]
    ('A', 'Ġ')
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


def build_tokenizer(
    spec: str, documents: Iterable[str] = (), cache_dir: str | Path | None = None
) -> "transformers.PreTrainedTokenizerFast":
    """Build the tokenizer that a specification names.

    `byte` has one token a byte (its id is the byte) and three specials; it decodes to the very text it encoded.
    `bpe:SIZE` is a byte-level BPE with SIZE tokens, trained on a sample of at most 8 MB drawn over the first
    64 MB of the documents; the same documents give the same merges. Anything else is a folder with a pretrained
    tokenizer, as `save_pretrained` writes it. None of them adds specials by itself: `prepare` puts them around
    documents.

    Args:
        spec: `byte`, `bpe:SIZE` or a folder.
        documents: what to train on; read for `bpe` only.
        cache_dir: where a trained BPE is kept for the next call with the same sample.

    Returns:
        A fast transformers tokenizer.

    Raises:
        ValueError: no such specification, a SIZE too small for 256 bytes and 3 specials, or a missing package.
        DataError: the folder's tokenizer is damaged, or there is no text to train on.

    >>> tokenizer = build_tokenizer("byte")
    >>> tokenizer.decode(tokenizer("naïve").input_ids), len(tokenizer)
    ('naïve', 259)
    """
    if spec == "byte":
        return _wrap(_byte_backend())
    if spec.startswith("bpe:"):
        return _wrap(_bpe_backend(_vocab_size(spec), documents, cache_dir))
    return _pretrained(spec)


def _wrap(backend: Any) -> "transformers.PreTrainedTokenizerFast":
    transformers = require("transformers", extra="hf", purpose="a tokenizer")
    backend.add_special_tokens(list(SPECIALS.values()))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **SPECIALS
    )


def _byte_backend() -> Any:
    tokenizers = require("tokenizers", extra="hf", purpose="a tokenizer")
    vocab = {letter: byte for byte, letter in enumerate(byte_letters())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _vocab_size(spec: str) -> int:
    digits = spec.removeprefix("bpe:")
    least = 256 + len(SPECIALS)
    if not digits.isdecimal() or int(digits) < least:
        raise ValueError(f"tokenizer {spec!r}: SIZE in bpe:SIZE must be a number of at least {least}, such as bpe:4096")
    return int(digits)


def _bpe_backend(vocab_size: int, documents: Iterable[str], cache_dir: str | Path | None) -> Any:
    tokenizers = require("tokenizers", extra="hf", purpose="a tokenizer")
    sample = _sample(documents)
    if not sample:
        raise DataError(f"tokenizer 'bpe:{vocab_size}' has no text to train on; give documents, or use 'byte'")
    cached = None
    if cache_dir is not None:
        key = hashlib.sha256(f"{vocab_size}\0{tokenizers.__version__}\0".encode())
        for piece in sample:
            key.update(hashlib.sha256(piece.encode()).digest())
        cached = Path(cache_dir, f"bpe-{vocab_size}-{key.hexdigest()[:16]}.json")
        if cached.exists():
            text = _read_cached(cached)
            if text is not None:
                return tokenizers.Tokenizer.from_str(text)
            warnings.warn(f"the cached tokenizer {cached} is damaged; training it again", stacklevel=4)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS.values()),
        initial_alphabet=byte_letters(),
        show_progress=False,
    )
    backend.train_from_iterator(sample, trainer)
    if cached is not None:
        _write_cached(cached, backend.to_str())
    return backend


def _sample(documents: Iterable[str]) -> list[str]:
    """Draw pieces of documents up to `SAMPLE_BYTES`, evenly and always the same ones: those of smallest hash."""
    kept: list[tuple[int, int, str]] = []
    read, held, order = 0, 0, 0
    for document in documents:
        for start in range(0, len(document), PIECE_CHARACTERS):
            piece = document[start : start + PIECE_CHARACTERS]
            data = piece.encode()
            rank = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
            heapq.heappush(kept, (-rank, order, piece))
            read, held, order = read + len(data), held + len(data), order + 1
            while held > SAMPLE_BYTES:
                held -= len(heapq.heappop(kept)[2].encode())
        if read >= READ_BYTES:
            break
    return [piece for _, _, piece in sorted(kept, key=lambda entry: entry[1])]


def _read_cached(path: Path) -> str | None:
    """Return the tokenizer kept in a file, or None where the file is not what was written."""
    try:
        stored = json.loads(path.read_bytes())
    except ValueError:
        return None
    if not isinstance(stored, dict) or not isinstance(stored.get("tokenizer"), str):
        return None
    text = stored["tokenizer"]
    return text if hashlib.sha256(text.encode()).hexdigest() == stored.get("sha256") else None


def _write_cached(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        aside.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokenizer": text}))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _pretrained(spec: str) -> "transformers.PreTrainedTokenizerFast":
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        raise ValueError(f"unknown tokenizer {spec!r}; choose byte, bpe:SIZE, or a folder that exists")
    transformers = require("transformers", extra="hf", purpose="a tokenizer")
    stored = folder / "tokenizer.json"
    if not stored.exists():
        raise DataError(f"{folder} has no tokenizer.json; save a fast tokenizer there with save_pretrained")
    try:
        structure = json.loads(stored.read_bytes())
    except ValueError:
        structure = None
    if not isinstance(structure, dict) or not {"model", "added_tokens"} <= structure.keys():
        raise DataError(f"{stored} is damaged: it does not describe a tokenizer; save the tokenizer again")
    try:
        return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"the tokenizer in {folder} is damaged ({reason}); save the tokenizer again") from error
