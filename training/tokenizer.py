"""Byte-level BPE: trained on the training documents, saved as an ordinary transformers tokenizer."""

from collections.abc import Iterable
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"

# The pieces that merges never cross: a line end with the punctuation before it and the indentation after it; a word
# with the punctuation or space before it; one digit; punctuation with the word after it; other white space.
# On Python source it gives 3.9 bytes per token at a vocabulary of 4,096, against 3.5 with GPT-2's pattern.
PIECES = r"[^\n\w]*\n\s*| ?[^\W\d]+| ?\d| ?[^\s\w]+\w*|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int, model_max_length: int) -> "PreTrainedTokenizerFast":
    """Trains a byte-level BPE tokenizer: lossless (decode(encode(text)) is text), with the special tokens
    `<|bos|>`, `<|eos|>`, `<|pad|>` as ids 0, 1, 2. Encoding adds no special tokens.

    Raises ValueError if `vocab_size` cannot hold the 256 bytes and the special tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 3:
        raise ValueError(
            f"vocab_size: expected at least {len(alphabet) + 3} (bytes and special tokens), got {vocab_size}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def encode_documents(tokenizer: "PreTrainedTokenizerFast", texts: list[str]) -> list[list[int]]:
    """Token ids of each text as a document: `<|bos|>`, the text, `<|eos|>`. A text that spells a special token is text."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True  # by this the library means: as ordinary characters
    encodings = backend.encode_batch(texts, add_special_tokens=False)
    backend.encode_special_tokens = False
    return [[tokenizer.bos_token_id, *encoding.ids, tokenizer.eos_token_id] for encoding in encodings]
