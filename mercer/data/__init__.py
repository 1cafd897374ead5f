"""Text for language models and classifiers: corpora, labelled text, tokenizers, packed windows.

Importing this imports neither transformers, tokenizers, datasets nor pyarrow.
"""

from mercer.data.corpora import CORPORA, CorpusInfo
from mercer.data.documents import read_documents
from mercer.data.labelled import Labelled, LabelledSplit, read_labelled
from mercer.data.labelled_batches import EncodedSplit, LabelledBatch, encode
from mercer.data.packing import Batch, PackedData, PackedSplit, prepare
from mercer.data.stream import TokenStream
from mercer.data.tokenizer import build_tokenizer

__all__ = [
    "CORPORA",
    "Batch",
    "CorpusInfo",
    "EncodedSplit",
    "Labelled",
    "LabelledBatch",
    "LabelledSplit",
    "PackedData",
    "PackedSplit",
    "TokenStream",
    "build_tokenizer",
    "encode",
    "prepare",
    "read_documents",
    "read_labelled",
]
