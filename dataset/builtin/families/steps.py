"""Questions that take a step before the answer: think aloud, or call a tool."""

from dataset.builtin.draw import Draw, Key
from dataset.builtin.families.fact_phrasings import HOME, JOB, PET, RELATION
from dataset.builtin.families.facts import asked_key, job_with_article, pet_with_article, relation_words
from dataset.builtin.families.numbers import number_pair
from dataset.builtin.question import Question, ToolUse
from dataset.builtin.world import Person
from dataset.tools import run_tool

TWO_STEP_ASKS = {
    "home": {
        "en": (
            "Where does {n}'s {r} live?",
            "In which town does the {r} of {n} live?",
            "Where is the home of {n}'s {r}?",
        ),
        "zh": ("{n}的{r}住在哪里？", "{n}的{r}住在哪个镇？", "{n}的{r}的家在哪里？"),
    },
    "job": {
        "en": (
            "What is the job of {n}'s {r}?",
            "What does {n}'s {r} do for a living?",
            "What work does the {r} of {n} do?",
        ),
        "zh": ("{n}的{r}是做什么工作的？", "{n}的{r}的职业是什么？", "{n}的{r}靠什么谋生？"),
    },
    "pet": {
        "en": ("What pet does {n}'s {r} have?", "Which animal does {n}'s {r} keep?", "What is the pet of {n}'s {r}?"),
        "zh": ("{n}的{r}养了什么动物？", "{n}的{r}的宠物是什么？", "{n}的{r}有什么宠物？"),
    },
}
CALCULATION_ASKS = {
    "+": {
        "en": ("What is {a} + {b}?", "Work out {a} + {b}.", "Please calculate {a} + {b}.", "How much is {a} + {b}?"),
        "zh": ("{a}+{b}等于多少？", "请计算{a}+{b}。", "算一下{a}+{b}。", "{a}+{b}是多少？"),
    },
    "-": {
        "en": ("What is {a} - {b}?", "Work out {a} - {b}.", "Please calculate {a} - {b}.", "How much is {a} - {b}?"),
        "zh": ("{a}-{b}等于多少？", "请计算{a}-{b}。", "算一下{a}-{b}。", "{a}-{b}是多少？"),
    },
    "*": {
        "en": ("What is {a} * {b}?", "Work out {a} * {b}.", "Please calculate {a} * {b}.", "How much is {a} * {b}?"),
        "zh": ("{a}*{b}等于多少？", "请计算{a}*{b}。", "算一下{a}*{b}。", "{a}*{b}是多少？"),
    },
}
LOOKUP_FORMS = {
    "age": {
        "en": (
            ("How old is {n}?", "What is {n}'s age?", "What is the age of {n}?", "Do you know how old {n} is?"),
            "{n} is {v} years old.",
        ),
        "zh": (("{n}今年多大？", "{n}几岁了？", "{n}的年龄是多少？", "你知道{n}多大了吗？"), "{n}今年{v}岁。"),
    },
    "phone": {
        "en": (
            (
                "What is {n}'s phone number?",
                "What is the phone number of {n}?",
                "How can I call {n}?",
                "I want to call {n}. What is the number?",
            ),
            "{n}'s phone number is {v}.",
        ),
        "zh": (
            ("{n}的电话号码是多少？", "{n}的电话是多少？", "怎么给{n}打电话？", "我想给{n}打电话，号码是多少？"),
            "{n}的电话号码是{v}。",
        ),
    },
    "house": {
        "en": (
            (
                "What is {n}'s house number?",
                "What is the house number of {n}?",
                "Which house number does {n} have?",
                "I am visiting {n}. What is the house number?",
            ),
            "{n}'s house number is {v}.",
        ),
        "zh": (
            ("{n}的门牌号是多少？", "{n}家的门牌号是多少？", "{n}家是几号？", "我要去{n}家，门牌号是多少？"),
            "{n}的门牌号是{v}。",
        ),
    },
}
TOOL_SETS = (("calculate", "lookup"), ("lookup", "calculate"))


def fact_sentence(draw: Draw, person: Person, attribute: str) -> str:
    """The plain sentence that states a person's home, job or pet."""
    name, language = person.name.to(draw.language), draw.language
    match attribute:
        case "home":
            return HOME[language].reply.format(n=name, v=person.home.name.to(language))
        case "job":
            return JOB[language].reply.format(n=name, v=job_with_article(person, language))
    return PET[language].reply.format(n=name, v=pet_with_article(person, language))


def two_step(draw: Draw) -> Question:
    """A fact about somebody's sibling or friend: first say who that is, then the fact."""

    def attempt():
        person, which, attribute = draw.one(draw.world.people), draw.number(0, 1), draw.one(tuple(TWO_STEP_ASKS))
        index = draw.number(0, 2)
        return (person, which, attribute, index), (
            "two_step",
            draw.language,
            ("sibling", "friend")[which],
            attribute,
            person.name.en,
            str(index),
        )

    (person, which, attribute, index), key = draw.keep(attempt)
    word, other = relation_words(draw, person)[which]
    names = {"n": person.name.to(draw.language), "r": word}
    first = RELATION[draw.language].reply.format(**names, v=other.name.to(draw.language))
    second = fact_sentence(draw, other, attribute)
    while (wrong := draw.one(draw.world.people)) in (person, other):
        pass
    return Question(
        family="two_step",
        language=draw.language,
        ask=TWO_STEP_ASKS[attribute][draw.language][index].format(**names),
        reply=second,
        keys=(key,),
        wrong=fact_sentence(draw, wrong, attribute),
        reasoning=first + (" " if draw.english else "") + second,
        value=second,
    )


def offered(draw: Draw) -> tuple[str, ...]:
    """The tools that a system message offers: both of them, in either order."""
    return draw.one(TOOL_SETS)


def _expression(draw: Draw) -> tuple[int, int, str, Key]:
    sign = draw.one(("+", "-", "*"))
    first, second, key = number_pair(draw, *draw.one(((10, 99), (100, 999))))
    if sign == "-":
        first, second = max(first, second), min(first, second)
    if sign == "*" and second > 99:
        sign = "+"
    return first, second, sign, key


def calculator(draw: Draw) -> Question:
    """A calculation handed to the calculator."""
    first, second, sign, key = _expression(draw)
    arguments = {"expression": f"{first} {sign} {second}"}
    result = run_tool("calculate", arguments)
    reply = "The result is {}." if draw.english else "结果是{}。"
    return Question(
        family="calculator",
        language=draw.language,
        ask=draw.one(CALCULATION_ASKS[sign][draw.language]).format(a=first, b=second),
        reply=reply.format(result),
        keys=(key,),
        accepted=(result,),
        wrong=reply.format(int(result) + draw.one((-10, 1, 10))),
        tools=offered(draw),
        uses=(ToolUse("calculate", arguments, result),),
        value=result,
    )


def lookup_use(person: Person, attribute: str, language: str) -> ToolUse:
    """The call that looks up one field of a person, with its result."""
    arguments = {"name": person.name.to(language), "field": attribute}
    return ToolUse("lookup", arguments, run_tool("lookup", arguments))


def lookup(draw: Draw) -> Question:
    """An entry of the register that no text tells."""

    def attempt():
        person, attribute = draw.one(draw.world.people), draw.one(tuple(LOOKUP_FORMS))
        ask = draw.one(LOOKUP_FORMS[attribute][draw.language][0]).format(n=person.name.to(draw.language))
        return (person, attribute, ask), asked_key(draw, ask)

    (person, attribute, ask), key = draw.keep(attempt)
    reply = LOOKUP_FORMS[attribute][draw.language][1]
    use = lookup_use(person, attribute, draw.language)
    name = person.name.to(draw.language)
    return Question(
        family="lookup",
        language=draw.language,
        ask=ask,
        reply=reply.format(n=name, v=use.result),
        keys=(key,),
        accepted=(use.result,),
        wrong=reply.format(n=name, v=int(use.result) + draw.number(1, 9)),
        tools=offered(draw),
        uses=(use,),
        value=use.result,
    )
