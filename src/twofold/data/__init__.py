"""Text for language models: documents from files or the hub, tokenizers, memory-mapped token files, packed sequences.

`prepare_text` turns a `DataConfig` into token files that runs share; `PackedSequences` cuts them into sequences
whose documents stay apart; `batch_order` says which sequences a training step takes.
"""

from twofold.data.packing import IGNORE_INDEX, PADDING_DOCUMENT, PackedSequences, PackedTokens, batch_order
from twofold.data.prepare import TextData, TokenFile, open_text, prepare_text
from twofold.data.sources import read_documents, split_documents
from twofold.data.tokenizers import END_OF_TEXT, build_tokenizer, end_of_text, end_of_text_id, vocabulary_size

__all__ = [
    "END_OF_TEXT",
    "IGNORE_INDEX",
    "PADDING_DOCUMENT",
    "PackedSequences",
    "PackedTokens",
    "TextData",
    "TokenFile",
    "batch_order",
    "build_tokenizer",
    "end_of_text",
    "end_of_text_id",
    "open_text",
    "prepare_text",
    "read_documents",
    "split_documents",
    "vocabulary_size",
]
