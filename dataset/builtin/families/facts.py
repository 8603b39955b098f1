"""Questions about the world: people, belongings, relations, towns, and what the world does not contain."""

from collections.abc import Callable

from dataset.builtin.draw import Draw, Key
from dataset.builtin.families.fact_phrasings import (
    COLOUR,
    HOME,
    JOB,
    OWNER,
    PET,
    PLACE,
    RELATION,
    UNKNOWN_REPLY,
    UNTOLD,
    WORKER,
    Phrasings,
)
from dataset.builtin.question import Question
from dataset.builtin.vocabulary import COLOURS, PETS, PLACES, STRANGERS, article, capital
from dataset.builtin.world import Person, Place


def job_with_article(person: Person, language: str) -> str:
    """The job as it follows "is": "a baker", "面包师"."""
    return article(person.job.en) if language == "en" else person.job.zh


def pet_with_article(person: Person, language: str) -> str:
    """The pet with article or measure word: "a cat", "一只猫"."""
    return article(person.pet.en) if language == "en" else person.pet.zh


def relation_words(draw: Draw, person: Person) -> tuple[tuple[str, Person], ...]:
    """The relations of a person: what the other is called and who it is."""
    friend = "best friend" if draw.english else "好朋友"
    return (
        (draw.world.sibling_word(person, draw.language), draw.world.sibling(person)),
        (friend, draw.world.friend(person)),
    )


def _question(
    draw: Draw,
    family: str,
    relation: str,
    phrasings: dict[str, Phrasings],
    make: Callable[[], tuple[dict, str, str, str]],
) -> Question:
    """A question whose key is (language, relation, entity, phrasing).

    `make` draws (names to fill in, the entity's key, the value, a wrong value).
    """
    questions, reply = phrasings[draw.language]

    def attempt():
        names, entity, value, wrong = make()
        index = draw.number(0, len(questions) - 1)
        return (names, value, wrong, index), ("fact", draw.language, relation, entity, str(index))

    (names, value, wrong, index), key = draw.keep(attempt)
    text = capital(reply.format(**names, v=value))
    bare = capital(value) + ("." if draw.english else "。")
    return Question(
        family=family,
        language=draw.language,
        ask=questions[index].format(**names),
        reply=text,
        keys=(key,),
        accepted=(bare,),
        wrong=capital(reply.format(**names, v=wrong)),
        value=value,
    )


def _about_person(draw: Draw, value_of: Callable[[Person], str]) -> tuple[dict, str, str, str]:
    """A person, and a wrong value taken from somebody else."""
    person = draw.one(draw.world.people)
    value = value_of(person)
    while (wrong := value_of(draw.one(draw.world.people))) == value:
        pass
    return {"n": person.name.to(draw.language)}, person.name.en, value, wrong


def home(draw: Draw) -> Question:
    """Where a person lives."""
    return _question(
        draw, "home", "home", HOME, lambda: _about_person(draw, lambda person: person.home.name.to(draw.language))
    )


def job(draw: Draw) -> Question:
    """What a person does for a living."""
    return _question(
        draw, "job", "job", JOB, lambda: _about_person(draw, lambda person: job_with_article(person, draw.language))
    )


def belonging(draw: Draw) -> Question:
    """Which pet a person has, or which colour a belonging has."""
    if draw.chance(0.5):
        return _question(
            draw,
            "belonging",
            "pet",
            PET,
            lambda: _about_person(draw, lambda person: pet_with_article(person, draw.language)),
        )

    def make():
        person = draw.one(draw.world.people)
        names = {"n": person.name.to(draw.language), "i": person.item.to(draw.language)}
        wrong = draw.one([colour for colour in COLOURS if colour != person.colour])
        return names, person.name.en, person.colour.to(draw.language), wrong.to(draw.language)

    return _question(draw, "belonging", "colour", COLOUR, make)


def relation(draw: Draw) -> Question:
    """Who somebody's brother, sister or best friend is."""
    which = draw.number(0, 1)

    def make():
        person = draw.one(draw.world.people)
        word, other = relation_words(draw, person)[which]
        alike = [one for one in draw.world.people if one.female == other.female and one not in (person, other)]
        wrong = draw.one(alike)
        names = {"n": person.name.to(draw.language), "r": word}
        return names, person.name.en, other.name.to(draw.language), wrong.name.to(draw.language)

    return _question(draw, "relation", ("sibling", "friend")[which], RELATION, make)


def reverse(draw: Draw) -> Question:
    """Who has that job in that town, or whose a belonging of that colour is."""
    by_job = draw.chance(0.5)

    def make():
        person = draw.one(draw.world.people)
        while (wrong := draw.one(draw.world.people)) is person:
            pass
        if by_job:
            names = {"j": person.job.to(draw.language), "p": person.home.name.to(draw.language)}
        else:
            names = {"c": person.colour.to(draw.language), "i": person.item.to(draw.language)}
        return names, person.name.en, person.name.to(draw.language), wrong.name.to(draw.language)

    return _question(draw, "reverse", "worker" if by_job else "owner", WORKER if by_job else OWNER, make)


def place(draw: Draw) -> Question:
    """What a town sells, eats, celebrates and has in its north."""
    attribute = draw.one(tuple(PLACE))

    def value_of(town: Place) -> str:
        return getattr(town, attribute).to(draw.language)

    def make():
        town = draw.one(draw.world.places)
        while (wrong := value_of(draw.one(draw.world.places))) == value_of(town):
            pass
        return {"p": town.name.to(draw.language)}, town.name.en, value_of(town), wrong

    return _question(draw, "place", attribute, PLACE[attribute], make)


def asked_key(draw: Draw, ask: str) -> Key:
    """The key of a question that is its own words: asked with and without tools it is still the same question."""
    return ("asked", draw.language, ask)


def unknown(draw: Draw) -> Question:
    """A question that the world has no answer to: a stranger, or a thing that is told of nobody."""
    stranger = draw.chance(0.5)

    def attempt():
        if stranger:
            name = draw.one(STRANGERS)
            relation_name, phrasings = draw.one((("home", HOME), ("job", JOB), ("pet", PET)))
            questions = phrasings[draw.language].questions
        else:
            name = draw.one(draw.world.people).name
            relation_name, questions = "untold", [question for question, _ in UNTOLD[draw.language]]
        index = draw.number(0, len(questions) - 1)
        ask = questions[index].format(n=name.to(draw.language))
        return (name, relation_name, ask, index), asked_key(draw, ask)

    (name, relation_name, ask, index), key = draw.keep(attempt)
    return Question(
        family="honesty",
        language=draw.language,
        ask=ask,
        reply=UNKNOWN_REPLY[draw.language],
        keys=(key,),
        wrong=_made_up(draw, relation_name, name.to(draw.language), index),
        value=UNKNOWN_REPLY[draw.language],
    )


def _made_up(draw: Draw, relation_name: str, name: str, index: int) -> str:
    """An invented answer to a question that has none."""
    if relation_name == "home":
        return HOME[draw.language].reply.format(n=name, v=draw.one(PLACES).to(draw.language))
    other = draw.one(draw.world.people)
    if relation_name == "job":
        return JOB[draw.language].reply.format(n=name, v=job_with_article(other, draw.language))
    if relation_name == "pet":
        pet = draw.one(PETS).to(draw.language)
        return PET[draw.language].reply.format(n=name, v=article(pet) if draw.english else pet)
    return UNTOLD[draw.language][index][1].format(n=name)


def honesty(draw: Draw) -> Question:
    """A quarter unknown things among three quarters known ones, so that neither reply alone pays."""
    if draw.chance(0.25):
        return unknown(draw)
    known = draw.one((home, job, belonging, relation))(draw)
    return Question(
        family="honesty",
        language=known.language,
        ask=known.ask,
        reply=known.reply,
        keys=known.keys,
        accepted=known.accepted,
        wrong=UNKNOWN_REPLY[known.language],
        value=known.value,
    )
