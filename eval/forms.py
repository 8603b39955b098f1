"""Instructions whose following a program can see: length, lines, beginning and end, words to use, JSON, language."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from dataset.text_statistics import text_statistics
from eval.contamination import words_in

LANGUAGE_NAMES = {"en": "english", "zh": "chinese"}


WORD_TOKENS = 4  # a long word, or a word with its marks
LINE_WORDS = 12
USUAL_TOKENS = 80
"""What a form that says nothing of its length is given; a cap is three times as much and some."""


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _is_json(reply: str, wanted: str) -> bool:
    try:
        value = json.loads(reply, parse_constant=_refuse)  # NaN is no JSON
    except (ValueError, RecursionError):
        return False
    return isinstance(value, {"object": dict, "array": list}.get(wanted, object))


# What a rule is called: the type of its value, and whether a reply follows it.
RULES: dict[str, tuple[type, Callable[[str, Any], bool]]] = {
    "min_words": (int, lambda reply, count: len(words_in(reply)) >= count),
    "max_words": (int, lambda reply, count: len(words_in(reply)) <= count),
    "lines": (int, lambda reply, count: len([line for line in reply.splitlines() if line.strip()]) == count),
    "starts_with": (str, lambda reply, text: reply.startswith(text)),
    "ends_with": (str, lambda reply, text: reply.endswith(text)),
    "contains": (list, lambda reply, texts: all(text.casefold() in reply.casefold() for text in texts)),
    "excludes": (list, lambda reply, texts: not any(text.casefold() in reply.casefold() for text in texts)),
    "capitals": (bool, lambda reply, wanted: reply.isupper() == wanted),
    "json": (str, _is_json),
    "language": (str, lambda reply, code: text_statistics(reply).language == LANGUAGE_NAMES[code]),
}


def check_form(form: Any) -> None:
    """Raise ValueError unless `form` is an object of known rules with values of their types."""
    if not isinstance(form, dict) or not form:
        raise ValueError(f"check form needs form: an object of some of {', '.join(RULES)}")
    for name, value in form.items():
        if name not in RULES:
            raise ValueError(f"form: {name!r} is unknown; known are {', '.join(RULES)}")
        kind = RULES[name][0]
        if type(value) is not kind or kind is list and not all(isinstance(text, str) for text in value):
            raise ValueError(f"form: {name} is {value!r}, not {'a list of texts' if kind is list else kind.__name__}")
    for name in ("max_words", "lines", "min_words"):
        if form.get(name, 1) < 1:
            raise ValueError(f"form: {name} {form[name]} must be at least 1")
    if form.get("min_words", 0) > form.get("max_words", float("inf")):
        raise ValueError(f"form: min_words {form['min_words']} is more than max_words {form['max_words']}")
    if form.get("language", "en") not in LANGUAGE_NAMES:
        raise ValueError(f"form: language {form['language']!r} is not one of {', '.join(LANGUAGE_NAMES)}")
    if form.get("json", "any") not in ("object", "array", "any"):
        raise ValueError(f"form: json {form['json']!r} is not one of object, array, any")


def tokens_of_form(form: Mapping[str, Any]) -> int:
    """About how many tokens a reply that follows the form may need."""
    words = max(form.get("min_words", 0), min(form.get("max_words", 0), 10_000), LINE_WORDS * form.get("lines", 0))
    return max(USUAL_TOKENS, WORD_TOKENS * words)


def follows(reply: str, form: Mapping[str, Any]) -> bool:
    """Whether a reply, without outer white space, is not empty and follows every rule."""
    reply = reply.strip()
    return bool(reply) and all(RULES[name][1](reply, value) for name, value in form.items())


def describe_form(form: Mapping[str, Any]) -> str:
    """Such as "max_words 20, json object"."""
    return ", ".join(f"{name} {value}" for name, value in form.items())
