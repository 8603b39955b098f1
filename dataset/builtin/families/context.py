"""Questions whose answer stands in the conversation itself: stories, what the user said, what the system said."""

from dataset.builtin.draw import Draw, Key
from dataset.builtin.question import Message, Question, message
from dataset.builtin.vocabulary import (
    ASSISTANTS,
    COLOURS,
    CONTAINERS,
    OBJECTS,
    PETS,
    VISITORS,
    WORKPLACES,
    Pair,
    article,
)

RECALL = {
    "name": {
        "en": (
            ("My name is {x}.", "I am {x}.", "Hello, my name is {x}."),
            "Nice to meet you, {x}!",
            ("What is my name?", "Do you remember my name?", "Who am I?", "Can you tell me my name?"),
            "Your name is {x}.",
        ),
        "zh": (
            ("我叫{x}。", "我的名字是{x}。", "你好，我叫{x}。"),
            "很高兴认识你，{x}！",
            ("我叫什么名字？", "你还记得我的名字吗？", "我是谁？", "我的名字是什么？"),
            "你叫{x}。",
        ),
    },
    "colour": {
        "en": (
            ("My favourite colour is {x}.", "I like {x} best of all colours.", "The colour that I love most is {x}."),
            "I see, you like {x}.",
            ("What is my favourite colour?", "Which colour do I like best?", "Do you remember my favourite colour?"),
            "Your favourite colour is {x}.",
        ),
        "zh": (
            ("我最喜欢的颜色是{x}。", "我最喜欢{x}。", "所有颜色里我最爱{x}。"),
            "知道了，你喜欢{x}。",
            ("我最喜欢什么颜色？", "我最喜欢的颜色是什么？", "你还记得我最喜欢的颜色吗？"),
            "你最喜欢的颜色是{x}。",
        ),
    },
    "pet": {
        "en": (
            ("I have {x}.", "At home I have {x}.", "My pet is {x}."),
            "How nice that you have {x}!",
            ("What pet do I have?", "Which animal do I have?", "Do you remember my pet?"),
            "You have {x}.",
        ),
        "zh": (
            ("我养了{x}。", "我家里有{x}。", "我有{x}。"),
            "你有{x}，真好！",
            ("我养了什么动物？", "我有什么宠物？", "你还记得我的宠物吗？"),
            "你养了{x}。",
        ),
    },
}
SMALL_TALK = {
    "en": (
        ("How are you?", "I am fine, thank you."),
        ("Thank you.", "You are welcome."),
        ("That is nice.", "I am glad."),
    ),
    "zh": (("你好吗？", "我很好，谢谢。"), ("谢谢。", "不客气。"), ("真不错。", "我很高兴。")),
}
PERSONA_SYSTEM = {
    "en": (
        "Your name is {a} and you work at the {w}.",
        "You are {a}. You work at the {w}.",
        "You are {a}, the assistant of the {w}.",
        "The {w} has an assistant. You are this assistant, and your name is {a}.",
    ),
    "zh": (
        "你的名字叫{a}，你在{w}工作。",
        "你是{a}。你在{w}工作。",
        "你是{a}，{w}的助手。",
        "{w}有一位助手，就是你，你叫{a}。",
    ),
}
PERSONA_ASKS = {
    "name": {
        "en": ("What is your name?", "Who are you?", "What are you called?", "May I ask your name?"),
        "zh": ("你叫什么名字？", "你是谁？", "你的名字是什么？", "请问你叫什么？"),
    },
    "work": {
        "en": ("Where do you work?", "What is your place of work?", "In which place do you work?"),
        "zh": ("你在哪里工作？", "你的工作地点是哪里？", "你在什么地方上班？"),
    },
}
PERSONA_REPLIES = {
    "name": {"en": "My name is {}.", "zh": "我叫{}。"},
    "work": {"en": "I work at the {}.", "zh": "我在{}工作。"},
}


def story_people(draw: Draw, count: int) -> list[str]:
    """Names of different people of the world."""
    return [person.name.to(draw.language) for person in draw.some(draw.world.people, count)]


def moved_thing(draw: Draw) -> tuple[Pair, Pair, Pair, Key]:
    """A thing, where it was put and where it was moved; the three belong to the draw's split."""

    def attempt():
        thing = draw.one(OBJECTS)
        first, second = draw.some(CONTAINERS, 2)
        return (thing, first, second), ("story", thing.en, first.en, second.en)

    (thing, first, second), key = draw.keep(attempt)
    return thing, first, second, key


def given_thing(draw: Draw) -> tuple[Pair, list[str], Key]:
    """A thing and three people through whose hands it goes; they belong to the draw's split."""

    def attempt():
        thing = draw.one(OBJECTS)
        people = draw.some(draw.world.people, 3)
        names = [person.name.to(draw.language) for person in people]
        return (thing, names), ("story", thing.en, *[person.name.en for person in people])

    (thing, names), key = draw.keep(attempt)
    return thing, names, key


def story_moved(draw: Draw) -> Question:
    """A thing is put somewhere and moved by somebody else: where is it now?"""
    thing, first, second, key = moved_thing(draw)
    who, other = story_people(draw, 2)
    names = {"n": who, "m": other, "o": thing.to(draw.language)}
    names |= {"a": first.to(draw.language), "b": second.to(draw.language)}
    story = draw.phrase(
        (
            "{n} puts the {o} in the {a}. Then {m} moves the {o} to the {b}.",
            "{n} keeps the {o} in the {a}. {m} takes it out and puts it in the {b}.",
            "The {o} is in the {a}. {n} calls {m}, and {m} moves it to the {b}.",
        ),
        (
            "{n}把{o}放进{a}。然后{m}把{o}移到{b}里。",
            "{n}的{o}在{a}里。{m}把它拿出来，放进{b}。",
            "{o}在{a}里。{n}叫来{m}，{m}把它放进{b}。",
        ),
    )
    ask = draw.phrase(
        ("Where is the {o} now?", "Where is the {o} at the end?"),
        ("现在{o}在哪里？", "最后{o}在哪里？"),
    )
    reply = "The {} is in the {}." if draw.english else "{}在{}里。"
    return Question(
        family="story",
        language=draw.language,
        ask=(story + (" " if draw.english else "") + ask).format(**names),
        reply=reply.format(names["o"], names["b"]),
        keys=(key,),
        accepted=(f"In the {names['b']}." if draw.english else f"在{names['b']}里。",),
        reasoning=f"First the {names['a']}, then the {names['b']}."
        if draw.english
        else f"先是{names['a']}，再是{names['b']}。",
        wrong=reply.format(names["o"], names["a"]),
        frame="story",
        value=names["b"],
    )


def story_given(draw: Draw) -> Question:
    """A thing goes from hand to hand: who has it now?"""
    thing, people, key = given_thing(draw)
    names = {"n": people[0], "m": people[1], "k": people[2], "o": thing.to(draw.language)}
    story = draw.phrase(
        (
            "{n} has the {o}. {n} gives it to {m}. {m} gives it to {k}.",
            "{n} gives the {o} to {m}. Later {m} gives the {o} to {k}.",
        ),
        ("{n}有{o}。{n}把它给了{m}。{m}又把它给了{k}。", "{n}把{o}给了{m}。后来{m}把{o}给了{k}。"),
    )
    ask = draw.phrase(("Who has the {o} now?", "Who has the {o} at the end?"), ("现在谁有{o}？", "最后{o}在谁手里？"))
    reply = "{} has the {}." if draw.english else "{}有{}。"
    return Question(
        family="story",
        language=draw.language,
        ask=(story + (" " if draw.english else "") + ask).format(**names),
        reply=reply.format(people[2], names["o"]),
        keys=(key,),
        accepted=(people[2] + ("." if draw.english else "。"),),
        reasoning=f"First {people[0]}, then {people[1]}, then {people[2]}."
        if draw.english
        else f"先是{people[0]}，再是{people[1]}，再是{people[2]}。",
        wrong=reply.format(draw.one(people[:2]), names["o"]),
        frame="story",
        value=people[2],
    )


def story(draw: Draw) -> Question:
    """A short story with a consequence."""
    return (story_moved if draw.chance(0.6) else story_given)(draw)


def told_value(draw: Draw, kind: str) -> Pair:
    """Something that a user may tell of themselves."""
    if kind == "name":
        return draw.one(VISITORS)
    if kind == "colour":
        return draw.one(COLOURS)
    pet = draw.one(PETS)
    return Pair(article(pet.en), pet.zh)


def recall(draw: Draw) -> Question:
    """The user says something of themselves, perhaps chats a little, and asks for it."""

    def attempt():
        kind = "name" if draw.chance(0.5) else draw.one(("colour", "pet"))
        value = told_value(draw, kind)
        asks = RECALL[kind][draw.language][2]
        index = draw.number(0, len(asks) - 1)
        told = draw.number(0, 2)
        return (kind, value, index, told), ("recall", draw.language, kind, value.en, str(index), str(told))

    (kind, value, index, told), key = draw.keep(attempt)
    tells, answer, asks, reply = RECALL[kind][draw.language]
    shown = value.to(draw.language)
    while (wrong := told_value(draw, kind)) == value:
        pass
    before: list[Message] = [message("user", tells[told].format(x=shown)), message("assistant", answer.format(x=shown))]
    if draw.chance(0.4):
        said, answered = draw.one(SMALL_TALK[draw.language])
        before += [message("user", said), message("assistant", answered)]
    return Question(
        family="recall",
        language=draw.language,
        ask=asks[index],
        reply=reply.format(x=shown),
        keys=(key,),
        wrong=reply.format(x=wrong.to(draw.language)),
        before=tuple(before),
        value=shown,
    )


def persona(draw: Draw) -> Question:
    """The system prompt says who the assistant is; the user asks."""

    def attempt():
        name, work = draw.one(ASSISTANTS), draw.one(WORKPLACES)
        return (name, work), ("persona", name.en, work.en)

    (name, work), key = draw.keep(attempt)
    kind = "name" if draw.chance(0.6) else "work"
    value = (name if kind == "name" else work).to(draw.language)
    wrong = draw.one([other for other in (ASSISTANTS if kind == "name" else WORKPLACES) if other not in (name, work)])
    system = draw.one(PERSONA_SYSTEM[draw.language]).format(a=name.to(draw.language), w=work.to(draw.language))
    reply = PERSONA_REPLIES[kind][draw.language]
    return Question(
        family="persona",
        language=draw.language,
        ask=draw.one(PERSONA_ASKS[kind][draw.language]),
        reply=reply.format(value),
        keys=(key,),
        wrong=reply.format(wrong.to(draw.language)),
        before=(message("system", system),),
        value=value,
    )
