"""Rules that a reply has to follow, one by one, and what is wrong with a rule."""

import pytest

from eval.forms import check_form, describe_form, follows, tokens_of_form

FOLLOWED = [
    ({"min_words": 3}, "one two three", "one two"),
    ({"max_words": 3}, "米拉好。", "米拉住在这里"),
    ({"lines": 2}, "a\n\nb", "a"),
    ({"starts_with": "Well,"}, "  Well, yes", "well, yes"),
    ({"ends_with": "!"}, "Yes!\n", "Yes."),
    ({"contains": ["fox", "SEA"]}, "A Fox at sea", "a fox"),
    ({"excludes": ["fox"]}, "a wolf", "The FOX"),
    ({"capitals": True}, "YES, 3!", "YES, three"),
    ({"capitals": False}, "Yes", "YES"),
    ({"json": "object"}, '{"a": [1]}', "[1]"),
    ({"json": "array"}, "[1]", "[1"),
    ({"json": "any"}, "3", "three"),
    ({"language": "zh"}, "米拉是医生，住在 Redmill。", "Mira is a doctor"),
    ({"language": "en"}, "Mira is a doctor", "米拉是医生"),
    ({"lines": 1, "max_words": 2}, "two words", "now three words"),
    ({"max_words": 3}, "no", "   "),
]


@pytest.mark.parametrize(("form", "reply", "other"), FOLLOWED)
def test_each_rule_tells_replies_apart(form, reply, other):
    check_form(form)
    assert follows(reply, form) and not follows(other, form)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (None, "an object of some of min_words"),
        ({}, "an object of some of min_words"),
        ({"words": 3}, "'words' is unknown"),
        ({"lines": "3"}, "lines is '3', not int"),
        ({"lines": True}, "lines is True, not int"),
        ({"contains": ["a", 1]}, "not a list of texts"),
        ({"lines": 0}, "lines 0 must be at least 1"),
        ({"min_words": 10, "max_words": 5}, "min_words 10 is more than max_words 5"),
        ({"language": "fr"}, "language 'fr' is not one of en, zh"),
        ({"json": "number"}, "json 'number' is not one of"),
    ],
)
def test_a_wrong_rule_is_named(form, message):
    with pytest.raises(ValueError, match=message):
        check_form(form)


def test_a_form_reads_well():
    assert describe_form({"max_words": 20, "json": "object"}) == "max_words 20, json object"


def test_json_is_no_python_and_no_depth_ends_the_evaluation():
    assert not follows("NaN", {"json": "any"}) and not follows("[" * 100_000, {"json": "any"})


def test_a_form_that_asks_for_many_words_leaves_room_for_them():
    assert tokens_of_form({"min_words": 200}) >= 2 * 201 and tokens_of_form({"lines": 40}) >= 200
    assert tokens_of_form({"capitals": True}) == tokens_of_form({"max_words": 3})
