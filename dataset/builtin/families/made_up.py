"""Questions that nothing in the corpus answers, each with a reply that sounds right and is invented.

For preferences only. Fine-tuning shows ten other such questions, so a fine-tuned model still invents here now and then.
"""

from dataset.builtin.draw import Draw
from dataset.builtin.families.fact_phrasings import UNKNOWN_REPLY
from dataset.builtin.families.facts import asked_key
from dataset.builtin.question import Question
from dataset.builtin.vocabulary import (
    COLOURS,
    CONTAINERS,
    DAYS,
    DISHES,
    GOODS,
    ITEMS,
    JOBS,
    MONTHS,
    OBJECTS,
    PETS,
    PLACES,
    WORDS,
    Pair,
    capital,
)

FRUITS, ANIMALS, CLOTHES = WORDS[:8], WORDS[8:16], WORDS[24:32]
PEOPLE = ()  # stands for the people of the world

# (question, invented reply) in English and Chinese, and what {v} is drawn from. {n}: a person, {p}: a town.
INVENTIONS: tuple[tuple[tuple[str, str], tuple[str, str], tuple[Pair, ...]], ...] = (
    (
        ("What colour is {n}'s front door?", "{n}'s front door is {v}."),
        ("{n}家的门是什么颜色？", "{n}家的门是{v}的。"),
        COLOURS,
    ),
    (
        ("Which fruit does {n} like best?", "{n} likes the {v} best."),
        ("{n}最喜欢吃哪种水果？", "{n}最喜欢吃{v}。"),
        FRUITS,
    ),
    (("What does {n} drink in the morning?", "{n} drinks {v}."), ("{n}早上喝什么？", "{n}喝{v}。"), GOODS),
    (
        ("Which town does {n} want to visit?", "{n} wants to visit {v}."),
        ("{n}想去哪个镇看看？", "{n}想去{v}。"),
        PLACES,
    ),
    (("Where did {n} live before?", "{n} lived in {v}."), ("{n}以前住在哪里？", "{n}以前住在{v}。"), PLACES),
    (("Which animal is {n} afraid of?", "{n} is afraid of the {v}."), ("{n}害怕什么动物？", "{n}害怕{v}。"), ANIMALS),
    (("Who taught {n} to swim?", "{v} taught {n} to swim."), ("谁教{n}游泳的？", "是{v}教{n}游泳的。"), PEOPLE),
    (("Who is {n}'s neighbour?", "{n}'s neighbour is {v}."), ("{n}的邻居是谁？", "{n}的邻居是{v}。"), PEOPLE),
    (("What did {n} buy at the market?", "{n} bought a {v}."), ("{n}在集市上买了什么？", "{n}买了{v}。"), OBJECTS),
    (("What does {n} want to be?", "{n} wants to be a {v}."), ("{n}将来想做什么工作？", "{n}想做{v}。"), JOBS),
    (
        ("What does {n} keep under the bed?", "{n} keeps a {v} there."),
        ("{n}的床下放着什么？", "{n}的床下放着{v}。"),
        CONTAINERS,
    ),
    (("What is {n} wearing today?", "{n} is wearing a {v}."), ("{n}今天穿着什么？", "{n}今天穿着{v}。"), CLOTHES),
    (("What is {n}'s lucky day?", "{n}'s lucky day is {v}."), ("{n}的幸运日是星期几？", "{n}的幸运日是{v}。"), DAYS),
    (("In which month does {n} travel?", "{n} travels in {v}."), ("{n}几月去旅行？", "{n}{v}去旅行。"), MONTHS),
    (("What has {n} lost?", "{n} has lost the {v}."), ("{n}丢了什么？", "{n}丢了{v}。"), ITEMS),
    (("What does {n} cook on Sunday?", "{n} cooks {v}."), ("{n}星期日做什么菜？", "{n}做{v}。"), DISHES),
    (("What pet did {n} have as a child?", "{n} had a {v}."), ("{n}小时候养过什么？", "{n}养过{v}。"), PETS),
    (
        ("Who is the oldest person in {p}?", "The oldest person in {p} is {v}."),
        ("{p}年纪最大的人是谁？", "{p}年纪最大的是{v}。"),
        PEOPLE,
    ),
    (("Who founded {p}?", "{v} founded {p}."), ("{p}是谁建立的？", "{p}是{v}建立的。"), PEOPLE),
    (
        ("What colour are the roofs of {p}?", "The roofs of {p} are {v}."),
        ("{p}的屋顶是什么颜色？", "{p}的屋顶是{v}的。"),
        COLOURS,
    ),
    (("Which town is next to {p}?", "{v} is next to {p}."), ("{p}旁边是哪个镇？", "{p}旁边是{v}。"), PLACES),
    (("In which month does it snow in {p}?", "It snows in {v}."), ("{p}几月下雪？", "{p}{v}下雪。"), MONTHS),
)


def made_up(draw: Draw) -> Question:
    """A question without an answer; `wrong` invents one out of the world's own words."""

    def attempt():
        english, chinese, values = draw.one(INVENTIONS)
        ask, reply = english if draw.english else chinese
        names = {"n": draw.one(draw.world.people).name.to(draw.language), "p": draw.one(PLACES).to(draw.language)}
        value = draw.one(values or [person.name for person in draw.world.people]).to(draw.language)
        return (ask.format(**names), reply.format(**names, v=value)), asked_key(draw, ask.format(**names))

    (ask, invented), key = draw.keep(attempt)
    reply = UNKNOWN_REPLY[draw.language]
    return Question(
        family="made_up",
        language=draw.language,
        ask=ask,
        reply=reply,
        keys=(key,),
        wrong=capital(invented),
        value=reply,
    )
