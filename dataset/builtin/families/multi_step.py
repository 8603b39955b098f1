"""Questions that take several calls of tools in a row.

Only sums of ages are shown in fine-tuning; the others are for reinforcement learning with tools.
"""

from collections.abc import Sequence

from dataset.builtin.draw import Draw, Key
from dataset.builtin.families.facts import asked_key, relation_words
from dataset.builtin.families.steps import lookup_use, offered
from dataset.builtin.question import Question, ToolUse
from dataset.builtin.world import Person
from dataset.tools import run_tool


def _calculated(left: str, sign: str, right: str) -> ToolUse:
    arguments = {"expression": f"{left} {sign} {right}"}
    return ToolUse("calculate", arguments, run_tool("calculate", arguments))


def _question(draw: Draw, family: str, ask: str, reply: str, uses: Sequence[ToolUse], key: Key, shown: str) -> Question:
    """A question whose answer is the result of the last call; `shown` is that answer as the reply states it."""
    return Question(
        family=family,
        language=draw.language,
        ask=ask,
        reply=reply.format(shown),
        keys=(key,),
        accepted=(shown,),
        wrong=reply.format(int(shown) + draw.number(1, 9)),
        tools=offered(draw),
        uses=tuple(uses),
        value=shown,
    )


def _two_people(draw: Draw, field: str) -> tuple[list[Person], Key]:
    """Two people, and the key of the pair of their numbers."""

    def attempt():
        people = draw.some(draw.world.people, 2)
        values = sorted(getattr(person, field) for person in people)
        return people, ("pair", *map(str, values))

    return draw.keep(attempt)


def _names(draw: Draw, people: Sequence[Person]) -> dict[str, str]:
    return {key: person.name.to(draw.language) for key, person in zip("nm", people, strict=False)}


def age_sum(draw: Draw) -> Question:
    """Look up two ages and add them."""
    people, key = _two_people(draw, "age")
    uses = [lookup_use(person, "age", draw.language) for person in people]
    uses.append(_calculated(uses[0].result, "+", uses[1].result))
    ask = draw.phrase(
        ("How old are {n} and {m} together?", "What is the sum of the ages of {n} and {m}?"),
        ("{n}和{m}的年龄加起来是多少？", "{n}和{m}一共多少岁？"),
    )
    reply = "Together they are {} years old." if draw.english else "他们一共{}岁。"
    return _question(draw, "age_sum", ask.format(**_names(draw, people)), reply, uses, key, uses[-1].result)


def age_gap(draw: Draw) -> Question:
    """Look up two ages and subtract one from the other."""
    people, key = _two_people(draw, "age")
    people.sort(key=lambda person: -person.age)
    uses = [lookup_use(person, "age", draw.language) for person in people]
    uses.append(_calculated(uses[0].result, "-", uses[1].result))
    ask = draw.phrase(
        ("How many years older is {n} than {m}?", "By how many years is {n} older than {m}?"),
        ("{n}比{m}大几岁？", "{n}比{m}大多少岁？"),
    )
    reply = "The difference is {} years." if draw.english else "相差{}岁。"
    return _question(draw, "age_gap", ask.format(**_names(draw, people)), reply, uses, key, uses[-1].result)


def house_sum(draw: Draw) -> Question:
    """Look up two house numbers and add them."""
    people, key = _two_people(draw, "house")
    uses = [lookup_use(person, "house", draw.language) for person in people]
    uses.append(_calculated(uses[0].result, "+", uses[1].result))
    ask = draw.phrase(
        ("What is the sum of the house numbers of {n} and {m}?", "Add the house numbers of {n} and {m}."),
        ("{n}和{m}的门牌号加起来是多少？", "把{n}和{m}的门牌号相加是多少？"),
    )
    reply = "The sum is {}." if draw.english else "和是{}。"
    return _question(draw, "house_sum", ask.format(**_names(draw, people)), reply, uses, key, uses[-1].result)


def age_then(draw: Draw) -> Question:
    """Look up an age, and add or subtract a few years."""
    later = draw.chance(0.5)

    def attempt():
        person, years = draw.one(draw.world.people), draw.number(2, 9)
        english = "How old will {n} be in {y} years?" if later else "How old was {n} {y} years ago?"
        chinese = "再过{y}年{n}多少岁？" if later else "{y}年前{n}多少岁？"
        ask = (english if draw.english else chinese).format(n=person.name.to(draw.language), y=years)
        return (person, years, ask), asked_key(draw, ask)

    (person, years, ask), key = draw.keep(attempt)
    use = lookup_use(person, "age", draw.language)
    uses = [use, _calculated(use.result, "+" if later else "-", str(years))]
    reply = "The age is {}." if draw.english else "年龄是{}岁。"
    return _question(draw, "age_then", ask, reply, uses, key, uses[-1].result)


def relative_age(draw: Draw) -> Question:
    """Look up who somebody's sibling or friend is, and then how old that one is."""

    def attempt():
        person, which = draw.one(draw.world.people), draw.number(0, 1)
        word, other = relation_words(draw, person)[which]
        ask = draw.phrase(
            ("How old is {n}'s {r}?", "What is the age of {n}'s {r}?"), ("{n}的{r}今年多大？", "{n}的{r}几岁了？")
        )
        ask = ask.format(n=person.name.to(draw.language), r=word)
        return (person, which, other, ask), asked_key(draw, ask)

    (person, which, other, ask), key = draw.keep(attempt)
    uses = [
        lookup_use(person, ("sibling", "friend")[which], draw.language),
        lookup_use(other, "age", draw.language),
    ]
    reply = "The age is {}." if draw.english else "年龄是{}岁。"
    return _question(draw, "relative_age", ask, reply, uses, key, uses[-1].result)


MULTI_STEP = (age_sum, age_gap, house_sum, age_then, relative_age)
