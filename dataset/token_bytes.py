"""How much text a token stands for."""

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase


def token_byte_lengths(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """(V,) int64: the number of raw bytes that each token id stands for; V is len(tokenizer).

    A byte-level vocabulary writes each byte as one character of a fixed 256-character alphabet, so the length of the
    vocabulary entry is the number of bytes. (`decode([id])` would not do: a token that holds part of a character
    decodes to U+FFFD, three bytes.) Control tokens, and ids that no token has, count 0.

    Raises:
        ValueError: the vocabulary is not byte-level.
    """
    lengths = torch.zeros(len(tokenizer), dtype=torch.long)
    alphabet = set(ByteLevel.alphabet())
    added = tokenizer.added_tokens_decoder
    for token, token_id in tokenizer.get_vocab().items():
        if token_id in added:
            is_control = added[token_id].special or (token.startswith("<") and token.endswith(">"))
            lengths[token_id] = 0 if is_control else len(token.encode("utf-8"))
        elif alphabet.issuperset(token):
            lengths[token_id] = len(token)
        else:
            raise ValueError(
                f"bits per byte need a byte-level tokenizer, but token {token_id} is {token!r}, "
                "which is not written in the byte-level alphabet; train one with scripts/train_tokenizer.py"
            )
    return lengths
