"""Two hundred strings that tokenizers like to cut differently."""

import itertools
import random

PIECES = [
    "Hello, world!",
    "你好，世界。",
    "ﬁne ﬂow",
    "e\u0301a\u0308o\u0302",  # letters with combining accents (NFD)
    "\u1112\u1161\u11ab\u1100\u1173\u11af",  # Hangul in parts
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "1234567890",
    "3.14159e-10",
    "１２３ＡＢＣ",
    "   three spaces",
    "trailing   ",
    "\ttab\t\ttabs",
    "line\nline\n\nline\r\nline\r\r",
    " \n \n ",
    "I'll you're he'd WE'VE it's 'S",
    "don’t “quote” — dash…",
    "snake_case camelCase SCREAMING",
    "def f(x):\n    return x ** 2  # comment\n",
    '{"name": "f", "arguments": {"x": [1, 2.5, null]}}',
    '"}\n.\n"}\n\n',
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|>",
    "<|endoftext|>",
    "<think>\nhm\n</think>\n\n",
    "<tool_call>{}</tool_call>",
    "<tool_response>4</tool_response>",
    "<|im_startx|> <|im_end <think",
    "<|buffer7|><|buffer99|>",
    "\u200b\u200d\ufeff\u00a0\u3000",
    "العربية עברית हिन्दी ไทย",
    "Ünïcödé ß Ǆ ŉ",
    "x²+y³=∑∞",
    "http://example.com/a?b=c&d=%20",
    "a" * 40,
    "啊" * 20,
    "\u0000\u0001\u001f",
    "\U0001f1e8\U0001f1f3\U00010348\U000e0041",
    "¿Qué? ¡Sí! №5 ½",
    "-- == != <= >= && || ::",
    "END",
]


def hard_strings(count: int = 200) -> list[str]:
    """The pieces, then two or three of them in a row, in an order that is always the same."""
    pairs = [left + between + right for left, right in itertools.permutations(PIECES, 2) for between in ("", " ")]
    return (PIECES + random.Random(0).sample(pairs, count))[:count]
