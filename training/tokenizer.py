"""Byte-level BPE: trained on the training documents, saved as an ordinary transformers tokenizer."""

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..chat import CHAT_TOKENS, load_chat_template


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"

# The pieces that merges never cross: a line end with the punctuation before it and the indentation after it; a word
# with the punctuation or space before it; one digit; punctuation with the word after it; other white space.
# On Python source it gives 3.9 bytes per token at a vocabulary of 4,096, against 3.5 with GPT-2's pattern.
PIECES = r"[^\n\w]*\n\s*| ?[^\W\d]+| ?\d| ?[^\s\w]+\w*|\s+(?!\S)|\s+"

# Words, figures, white space and scripts that tokenizers with one vocabulary cut differently.
PROBE = "def f(x):\n\t\treturn  x + 1234567.5\r\n\n  The cat's 3 hats; naïve\u0301 \u6f22\u5b57 \U0001f642 <|eos|> HTTPServer"


def train_tokenizer(texts: Iterable[str], vocab_size: int, model_max_length: int) -> "PreTrainedTokenizerFast":
    """Trains a byte-level BPE tokenizer: lossless (decode(encode(text)) is text), with the special tokens
    `<|bos|>`, `<|eos|>`, `<|pad|>` as ids 0, 1, 2, those of conversations and media (`CHAT_TOKENS`) behind them, and the
    chat template. Encoding adds no special tokens.

    Raises ValueError if `vocab_size` cannot hold the 256 bytes and the special tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [BOS, EOS, PAD, *CHAT_TOKENS]
    smallest = len(alphabet) + len(special)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size: expected at least {smallest} (bytes and special tokens), got {vocab_size}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
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
        chat_template=load_chat_template(),
    )


def encode_documents(tokenizer: "PreTrainedTokenizerFast", texts: list[str]) -> list[list[int]]:
    """Token ids of each text as a document: `<|bos|>` (where the tokenizer has one), the text, `<|eos|>`. A text that
    spells a special token is text. A truncation or padding that was saved with the tokenizer is switched off."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # by this the library means: as ordinary characters
    encodings = backend.encode_batch(texts, add_special_tokens=False)
    backend.encode_special_tokens = False
    prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [[*prefix, *encoding.ids, tokenizer.eos_token_id] for encoding in encodings]


def tokenizer_facts(tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """What prepared data says of its tokenizer: `fingerprint`, `vocab_size` (the highest id plus one), `bos_token_id`
    (may be None), `eos_token_id`. The fingerprint is of the vocabulary and of a text's ids, not of the saved files, so
    it outlives another version of the libraries.

    Raises ValueError if the tokenizer is not of the `tokenizers` library or has no eos token.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"tokenizer: expected one with a tokenizer.json, got {type(tokenizer).__name__}")
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer: expected one with an eos token, got none")
    vocabulary = tokenizer.get_vocab()
    content = [sorted(vocabulary.items(), key=lambda item: item[1]), encode_documents(tokenizer, [PROBE])]
    return {
        "fingerprint": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        "vocab_size": max(vocabulary.values()) + 1,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
