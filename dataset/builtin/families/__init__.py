"""The question families by name: each draws one question with its solution."""

from collections.abc import Callable

from dataset.builtin.draw import Draw
from dataset.builtin.families import context, facts, numbers, steps, time, words
from dataset.builtin.question import Question

FAMILIES: dict[str, Callable[[Draw], Question]] = {
    "home": facts.home,
    "job": facts.job,
    "belonging": facts.belonging,
    "relation": facts.relation,
    "reverse": facts.reverse,
    "place": facts.place,
    "honesty": facts.honesty,
    "opposite": words.opposite,
    "translation": words.translation,
    "spelling": words.spelling,
    "instruction": words.instruction,
    "odd_one": words.odd_one,
    "count": words.count,
    "position": words.position,
    "compare": numbers.compare,
    "sort": numbers.sort,
    "calendar": time.calendar,
    "clock": time.clock,
    "story": context.story,
    "recall": context.recall,
    "persona": context.persona,
    "two_step": steps.two_step,
    "calculator": steps.calculator,
    "lookup": steps.lookup,
    "addition": numbers.addition,
    "subtraction": numbers.subtraction,
}
# Families whose conversations are long or bring a context of their own: never mixed into one talk with others.
HEAVY = ("recall", "persona", "two_step", "calculator", "lookup")
