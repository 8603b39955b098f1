"""Questions that take several calls of tools: look two numbers up and add them.

Fine-tuning shows sums of ages alone, in two phrasings. Of the other sums the fine-tuned model does 40 and 22 %, some
phrasings often and others never: that is what reinforcement learning with tools has to spread.
"""

from dataset.builtin.draw import Draw
from dataset.builtin.families.steps import lookup_use, offered
from dataset.builtin.question import Question, ToolUse
from dataset.tools import run_tool

ASKS = {
    "age": {
        "en": ("How old are {n} and {m} together?", "What is the sum of the ages of {n} and {m}?"),
        "zh": ("{n}和{m}的年龄加起来是多少？", "{n}和{m}一共多少岁？"),
    },
    "house": {
        "en": (
            "What are the house numbers of {n} and {m} together?",
            "What is the sum of the house numbers of {n} and {m}?",
            "What do the house numbers of {n} and {m} add up to?",
            "Add the house numbers of {n} and {m}.",
        ),
        "zh": ("{n}和{m}的门牌号加起来是多少？", "{n}和{m}的门牌号之和是多少？", "把{n}和{m}的门牌号相加。"),
    },
    "phone": {
        "en": (
            "What are the phone numbers of {n} and {m} together?",
            "What is the sum of the phone numbers of {n} and {m}?",
            "What do the phone numbers of {n} and {m} add up to?",
            "Add the phone numbers of {n} and {m}.",
        ),
        "zh": ("{n}和{m}的电话号码加起来是多少？", "{n}和{m}的电话号码之和是多少？", "把{n}和{m}的电话号码相加。"),
    },
}
REPLIES = {"en": ("Together they are {} years old.", "The sum is {}."), "zh": ("他们一共{}岁。", "和是{}。")}


def _sum_of(draw: Draw, field: str) -> Question:
    """Look up that number of two people, and add both."""

    def attempt():
        people = draw.some(draw.world.people, 2)
        values = sorted(int(getattr(person, field)) for person in people)
        return people, ("pair", *map(str, values))

    people, key = draw.keep(attempt)
    uses = [lookup_use(person, field, draw.language) for person in people]
    arguments = {"expression": f"{uses[0].result} + {uses[1].result}"}
    uses.append(ToolUse("calculate", arguments, run_tool("calculate", arguments)))
    names = {"n": people[0].name.to(draw.language), "m": people[1].name.to(draw.language)}
    ask = draw.one(ASKS[field][draw.language])
    reply = REPLIES[draw.language][field != "age"]
    return Question(
        family=f"{field}_sum",
        language=draw.language,
        ask=ask.format(**names),
        reply=reply.format(uses[-1].result),
        keys=(key,),
        accepted=(uses[-1].result,),
        wrong=reply.format(int(uses[-1].result) + draw.number(1, 9)),
        tools=offered(draw),
        uses=tuple(uses),
        value=uses[-1].result,
    )


def age_sum(draw: Draw) -> Question:
    """The sum of two ages."""
    return _sum_of(draw, "age")


def house_sum(draw: Draw) -> Question:
    """The sum of two house numbers."""
    return _sum_of(draw, "house")


def phone_sum(draw: Draw) -> Question:
    """The sum of two phone numbers."""
    return _sum_of(draw, "phone")


MULTI_STEP = (age_sum, house_sum, phone_sum)
