"""The bytes behind tokens: against the text's own."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dataset.token_bytes import token_byte_lengths
from trainer.weights import DEFAULT_TOKENIZER, load_tokenizer

TEXTS = ["The cat sat on the mat.", "米拉住在山谷里。", "naïve façade 🙂 42", "x"]


def test_bytes_of_tokens_add_up_to_the_bytes_of_the_text(tokenizer):
    lengths = token_byte_lengths(tokenizer)
    assert lengths.shape == (len(tokenizer),) and lengths.dtype == torch.long
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert int(lengths[ids].sum()) == len(text.encode())


def test_part_of_a_character_counts_its_own_bytes_and_control_tokens_none(tokenizer):
    lengths = token_byte_lengths(tokenizer)
    parts = [index for index in range(36, len(tokenizer)) if tokenizer.decode([index]) == "\ufffd"]
    assert parts, "a byte-level vocabulary has tokens that are part of a character"
    assert int(lengths[parts].min()) == 1, "three bytes is what decoding would say"
    assert lengths[:36].tolist() == [0] * 36
    assert int((lengths[36:] == 0).sum()) == 0


def test_a_tokenizer_without_bytes_is_refused():
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "世界": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="byte-level tokenizer.*'世界'.*train_tokenizer"):
        token_byte_lengths(PreTrainedTokenizerFast(tokenizer_object=words))


def test_an_added_word_counts_its_bytes(tokenizer):
    own = load_tokenizer(DEFAULT_TOKENIZER)
    own.add_tokens(["世界"])
    assert token_byte_lengths(own)[-1] == 6
