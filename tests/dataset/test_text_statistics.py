"""Characters, bytes and language of texts, against counts by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.text_statistics import text_statistics


@pytest.mark.parametrize(
    "text, language",
    [
        ("The cat sat.", "english"),
        ("猫坐着。", "chinese"),
        ("GDP增长了三个百分点。", "chinese"),
        ("Кошка сидит", "other"),
        ("3+4=7", "english"),
        ("고양이가 앉아 있다 ok", "other"),
        ("It\u2019s \u201cquoted\u201d \u2014 and caf\u00e9", "english"),
    ],
)
def test_languages(text, language):
    assert text_statistics(text).language == language


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_characters_and_bytes(text):
    statistics = text_statistics(text)
    assert (statistics.characters, statistics.bytes) == (len(text), len(text.encode()))
