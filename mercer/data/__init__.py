"""Text for language models: corpora, tokenizers, packed windows.

Importing this imports neither transformers, tokenizers, datasets nor pyarrow.
"""

from mercer.data.corpora import CORPORA, CorpusInfo
from mercer.data.documents import read_documents
from mercer.data.packing import Batch, PackedData, PackedSplit, prepare
from mercer.data.stream import TokenStream
from mercer.data.tokenizer import build_tokenizer

__all__ = [
    "CORPORA",
    "Batch",
    "CorpusInfo",
    "PackedData",
    "PackedSplit",
    "TokenStream",
    "build_tokenizer",
    "prepare",
    "read_documents",
]
