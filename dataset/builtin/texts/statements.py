"""Single sentences that state one fact of the world, in several phrasings."""

from dataset.builtin.draw import Draw
from dataset.builtin.families.facts import job_with_article, pet_with_article
from dataset.builtin.vocabulary import article
from dataset.builtin.world import Person, Place

PERSON_FACTS = {
    "home": {
        "en": (
            "{n} lives in {p}.",
            "{n}'s home is in {p}.",
            "The home of {n} is in {p}.",
            "{p} is the town where {n} lives.",
            "{n} has a house in {p}.",
        ),
        "zh": ("{n}住在{p}。", "{n}的家在{p}。", "{n}家在{p}。", "{p}是{n}居住的地方。", "{n}在{p}有一座房子。"),
    },
    "job": {
        "en": (
            "{n} is {j}.",
            "{n} works as {j}.",
            "{n} is {j} by profession.",
            "The {k} of {p} is {n}.",
            "The people of {p} have a good {k}. It is {n}.",
        ),
        "zh": (
            "{n}是一名{j}。",
            "{n}的职业是{j}。",
            "{n}的工作是当{j}。",
            "{n}靠当{j}谋生。",
            "{p}的{j}是{n}。",
            "{p}有一名好{j}，就是{n}。",
        ),
    },
    "pet": {
        "en": ("{n} has {a}.", "{n} keeps {a}.", "{n}'s pet is {a}.", "{n} has {a} as a pet.", "{n} lives with {a}."),
        "zh": ("{n}养了{a}。", "{n}家里养着{a}。", "{n}的宠物是{a}。", "{n}有{a}。", "{a}和{n}住在一起。"),
    },
    "item": {
        "en": (
            "{n} has {ci}.",
            "{n}'s {i} is {c}.",
            "The {c} {i} belongs to {n}.",
            "The {i} of {n} is {c}.",
            "The owner of the {c} {i} is {n}.",
        ),
        "zh": (
            "{n}的{i}是{c}的。",
            "{c}的{i}是{n}的。",
            "{n}有{c}的{i}。",
            "{c}的{i}属于{n}。",
            "{c}的{i}的主人是{n}。",
        ),
    },
    "sibling": {
        "en": (
            "{n}'s {r} is {s}.",
            "{n}'s {r} is called {s}.",
            "The {r} of {n} is {s}.",
            "{n} has a {r}, {s}.",
            "{s} is {n}'s {r}.",
        ),
        "zh": ("{n}的{r}是{s}。", "{n}的{r}叫{s}。", "{s}是{n}的{r}。", "{n}有一个{r}，叫{s}。", "{n}的{r}名叫{s}。"),
    },
    "friend": {
        "en": (
            "{n}'s best friend is {f}.",
            "The best friend of {n} is {f}.",
            "{n} and {f} are best friends.",
            "{n} has a best friend, {f}.",
        ),
        "zh": ("{n}的好朋友是{f}。", "{n}和{f}是好朋友。", "{f}是{n}的好朋友。", "{n}有一个好朋友，叫{f}。"),
    },
}
PLACE_FACTS = {
    "goods": {
        "en": (
            "The market of {p} sells {v}.",
            "At the market of {p} people sell {v}.",
            "{v} is sold in {p}.",
            "In {p} you can buy {v}.",
        ),
        "zh": ("{p}的集市卖{v}。", "{p}的集市上卖的是{v}。", "在{p}的集市上能买到{v}。", "{p}出售{v}。"),
    },
    "landmark": {
        "en": (
            "In the north of {p} there is {v}.",
            "{v} stands in the north of {p}.",
            "If you go north in {p}, you will see {v}.",
        ),
        "zh": ("{p}的北边有{v}。", "在{p}的北边能看到{v}。", "在{p}往北走，会看到{v}。"),
    },
    "dish": {
        "en": ("People in {p} like to eat {v}.", "The favourite food in {p} is {v}.", "In {p} people love {v}."),
        "zh": ("{p}的人喜欢吃{v}。", "{p}的人最爱吃{v}。", "在{p}，人们常吃{v}。"),
    },
    "festival": {
        "en": (
            "The festival of {p} is in {v}.",
            "{p} holds its festival in {v}.",
            "In {v} there is a festival in {p}.",
        ),
        "zh": ("{p}的节日在{v}。", "{p}在{v}过节。", "{v}是{p}过节的月份。"),
    },
}


def person_names(draw: Draw, person: Person) -> dict[str, str]:
    """Everything that a sentence about a person may name, in the draw's language."""
    language, world = draw.language, draw.world
    item, colour = person.item.to(language), person.colour.to(language)
    return {
        "n": person.name.to(language),
        "p": person.home.name.to(language),
        "j": job_with_article(person, language),
        "k": person.job.to(language),
        "a": pet_with_article(person, language),
        "i": item,
        "c": colour,
        "ci": article(f"{colour} {item}") if language == "en" else f"{colour}的{item}",
        "r": world.sibling_word(person, language),
        "s": world.sibling(person).name.to(language),
        "f": world.friend(person).name.to(language),
    }


def person_fact(draw: Draw, person: Person, fact: str) -> str:
    """One sentence that states `fact` ("home", "job", ...) of a person; half the time in its plainest form."""
    forms = PERSON_FACTS[fact][draw.language]
    form = forms[0] if draw.chance(0.3) else draw.one(forms)
    return form.format(**person_names(draw, person))


def place_fact(draw: Draw, town: Place, fact: str) -> str:
    """One sentence that states `fact` ("goods", "landmark", ...) of a town."""
    forms = PLACE_FACTS[fact][draw.language]
    form = forms[0] if draw.chance(0.3) else draw.one(forms)
    sentence = form.format(p=town.name.to(draw.language), v=getattr(town, fact).to(draw.language))
    sentence = sentence[0].upper() + sentence[1:]
    if fact == "goods" and town.goods.en == "flowers":
        sentence = sentence.replace("Flowers is", "Flowers are")
    return sentence
