"""Tokenizers: bytes, a byte-level BPE trained on the spot, GPT-2, or a folder.

All are one type, `tokenizers.Tokenizer`. Because of that, the `tokenizer.json` in a model folder
loads in Transformers as `PreTrainedTokenizerFast`.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from twofold.spec import DataConfig, DataError, did_you_mean

END_OF_TEXT = "<|endoftext|>"
"""The token that ends every document in the tokenizers made here, as in GPT-2."""

GPT2_REPOSITORY = "openai-community/gpt2"
"""Where the tokenizer `gpt2` is downloaded from."""

# What other tokenizers call the end of a document: Llama 3, Llama 2 and Mistral, Gemma, DeepSeek.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
_BUILT_IN = ("bytes", "bpe", "gpt2")


def build_tokenizer(config: DataConfig, training_documents: Sequence[str]) -> Tokenizer:
    """Makes or loads the tokenizer that `config.tokenizer` names.

    - `bytes`: token i is byte i; end-of-text is 256.
    - `bpe`: a byte-level BPE with at most `config.tokenizer_vocab_size` tokens (fewer where the text has no more pairs
      that occur twice), trained on `training_documents`. The same documents give the same tokenizer.
    - `gpt2`: downloaded from the hub once, then from its cache.
    - a folder with `tokenizer.json`, or with `vocab.json` and `merges.txt` of a byte-level BPE as GPT-2's.

    Bytes, BPE and GPT-2 reproduce any text exactly: `decode(encode(text).ids, skip_special_tokens=False) == text`.

    Args:
        config: Names the tokenizer.
        training_documents: Read by `bpe` only.

    Raises:
        DataError: for an unknown name, a folder that holds no tokenizer, or one without an end-of-text token.
    """
    if config.tokenizer == "bytes":
        tokenizer = _byte_level(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    elif config.tokenizer == "bpe":
        tokenizer = _train(training_documents, config.tokenizer_vocab_size)
    elif config.tokenizer == "gpt2":
        tokenizer = _download_gpt2()
    else:
        tokenizer = _load_folder(config.tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end_of_text_id(tokenizer)
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> str:
    """The token that ends a document; `DataError` where the tokenizer has none under a known name."""
    for name in _END_OF_TEXT_NAMES:
        if tokenizer.token_to_id(name) is not None:
            return name
    raise DataError(f"the tokenizer has no end-of-text token; it needs one of {', '.join(_END_OF_TEXT_NAMES)}")


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document; `DataError` as `end_of_text`."""
    found = tokenizer.token_to_id(end_of_text(tokenizer))
    assert found is not None
    return int(found)


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """The number of rows that an embedding needs: the largest id plus one."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """The printable symbol that stands for each byte in byte-level tokenizers, with the byte as its id."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {symbols[byte]: byte for byte in range(256)}


def _train(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    if not documents:
        raise DataError("tokenizer 'bpe' is trained on the training documents, and there are none")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    return tokenizer


def _download_gpt2() -> Tokenizer:
    try:
        return Tokenizer.from_pretrained(GPT2_REPOSITORY)
    except Exception as error:  # the hub client raises many types, most of them for a missing network
        raise DataError(
            f"tokenizer 'gpt2' could not be downloaded from {GPT2_REPOSITORY}; without a network, give a folder that "
            "holds its vocab.json and merges.txt"
        ) from error


def _load_folder(given: str) -> Tokenizer:
    folder = Path(given).expanduser()
    if not folder.is_dir():
        hint = did_you_mean(given, _BUILT_IN)
        raise DataError(f"tokenizer '{given}' is none of {', '.join(_BUILT_IN)}, and no folder has that name{hint}")
    whole, vocabulary, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    try:
        if whole.is_file():
            return Tokenizer.from_file(str(whole))
        if vocabulary.is_file() and merges.is_file():
            return _byte_level(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the tokenizers library raises plain Exception for a malformed file
        raise DataError(f"the tokenizer in folder {folder} cannot be read: {error}") from error
    raise DataError(f"folder {folder} holds no tokenizer: it needs tokenizer.json, or vocab.json and merges.txt")
