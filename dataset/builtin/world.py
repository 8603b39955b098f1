"""The invented world: people, towns and what is true of them.

There is one world for all corpora: the lookup tool answers from it whatever seed drew the texts.
"""

import random
from dataclasses import dataclass

from dataset.builtin.vocabulary import (
    COLOURS,
    DISHES,
    GOODS,
    ITEMS,
    JOBS,
    LANDMARKS,
    MEN,
    MONTHS,
    PETS,
    PLACES,
    WOMEN,
    Pair,
)


@dataclass(frozen=True, eq=False)
class Place:
    """A town and the four things that the world says about it."""

    name: Pair
    goods: Pair
    landmark: Pair
    dish: Pair
    festival: Pair


@dataclass(frozen=True, eq=False)
class Person:
    """One inhabitant. `age`, `phone` and `house` are written in the town register only, never in the texts."""

    name: Pair
    female: bool
    home: Place
    job: Pair
    pet: Pair
    item: Pair
    colour: Pair
    age: int
    phone: str
    house: int


@dataclass(frozen=True, eq=False)
class World:
    """All people and places. Siblings and best friends are pairs of indices into `people`."""

    people: tuple[Person, ...]
    places: tuple[Place, ...]
    sibling_of: tuple[int, ...]
    friend_of: tuple[int, ...]

    def sibling(self, person: Person) -> Person:
        """The brother or sister of `person`; everybody has exactly one."""
        return self.people[self.sibling_of[self.people.index(person)]]

    def friend(self, person: Person) -> Person:
        """The best friend of `person`; friendship is mutual."""
        return self.people[self.friend_of[self.people.index(person)]]

    def sibling_word(self, person: Person, language: str) -> str:
        """What the sibling is to `person`: sister or brother; Chinese also says elder or younger."""
        other = self.sibling(person)
        if language == "en":
            return "sister" if other.female else "brother"
        if other.age > person.age:
            return "姐姐" if other.female else "哥哥"
        return "妹妹" if other.female else "弟弟"

    def people_of(self, place: Place) -> list[Person]:
        """The people who live in `place`, in the order of the register."""
        return [person for person in self.people if person.home is place]

    def find(self, name: str) -> Person | None:
        """The person of that English (any case) or Chinese name, or None."""
        wanted = name.strip().casefold()
        for person in self.people:
            if wanted in (person.name.en.casefold(), person.name.zh):
                return person
        return None


WORLD_SEED = 0


def build_world() -> World:
    """The world, always the same one.

    By construction each (job, town) and each (colour, belonging) names one person, siblings and friends are
    mutual, never the same person and never of one's own town, and siblings differ in age.
    """
    rng = random.Random(f"world {WORLD_SEED}")
    columns = [rng.sample(column, len(PLACES)) for column in (GOODS, LANDMARKS, DISHES, MONTHS)]
    places = tuple(Place(*row) for row in zip(PLACES, *columns, strict=True))
    names = [(name, True) for name in WOMEN] + [(name, False) for name in MEN]
    rng.shuffle(names)
    count = len(names)
    jobs = _town_jobs(rng, count)
    pets = _spread(rng, PETS, count)
    owned = rng.sample([(item, colour) for item in ITEMS for colour in COLOURS], count)
    ages = rng.sample(range(20, 80), count)
    phones = rng.sample(range(201, 999), count)
    houses = rng.sample(range(1, 99), count)
    people = tuple(
        Person(
            name=name,
            female=female,
            home=places[index % len(places)],
            job=jobs[index],
            pet=pets[index],
            item=owned[index][0],
            colour=owned[index][1],
            age=ages[index],
            phone=str(phones[index]),
            house=houses[index],
        )
        for index, (name, female) in enumerate(names)
    )
    sibling_of = _pairing(rng, count)
    friend_of = _pairing(rng, count, sibling_of)
    return World(people, places, sibling_of, friend_of)


def _spread(rng: random.Random, values: tuple[Pair, ...], count: int) -> list[Pair]:
    """`count` values in random order, each about equally often."""
    drawn = [values[index % len(values)] for index in range(count)]
    rng.shuffle(drawn)
    return drawn


def _town_jobs(rng: random.Random, count: int) -> list[Pair]:
    """A job for each person such that no town (persons with equal index modulo the towns) has a job twice."""
    while True:
        jobs = _spread(rng, JOBS, count)
        if len({(index % len(PLACES), job) for index, job in enumerate(jobs)}) == count:
            return jobs


def _pairing(rng: random.Random, count: int, others: tuple[int, ...] = ()) -> tuple[int, ...]:
    """A random perfect matching of people of different towns, without the pairs of the matching `others`."""
    while True:
        order = rng.sample(range(count), count)
        couples = list(zip(order[::2], order[1::2], strict=True))
        if any((left - right) % len(PLACES) == 0 or (others and others[left] == right) for left, right in couples):
            continue
        partner = dict(couples) | {right: left for left, right in couples}
        return tuple(partner[index] for index in range(count))
