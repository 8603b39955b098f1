"""Texts whose later part repeats the earlier: meetings, staff lists, things and their holders, words said again.

What is said in them is new in every text, so it can only be read from the text itself. A small model learns to look
back (to copy from its context) from such texts, and everything that depends on a conversation depends on that.
"""

from dataset.builtin.draw import Draw
from dataset.builtin.families import context, words
from dataset.builtin.vocabulary import (
    ASSISTANTS,
    COLOURS,
    CONTAINERS,
    OBJECTS,
    VISITORS,
    WORDS,
    WORKPLACES,
    Pair,
    capital,
    listing,
)

SPACE = {"en": " ", "zh": ""}
ALL_KINDS = (WORDS, COLOURS, OBJECTS, CONTAINERS, WORKPLACES, VISITORS, ASSISTANTS)


def meeting(draw: Draw) -> str:
    """A guest tells the host one or two things, and asks for them again."""
    guest, host = ("Guest: ", "Host: ") if draw.english else ("客人：", "主人：")
    lines = []
    kinds = set()
    for _ in range(draw.number(1, 3)):
        question = context.recall(draw)
        kind = question.keys[0][2]
        if kind not in kinds:  # nobody has two names
            told, answered = (entry["content"] for entry in question.before[:2])
            lines += [guest + told, host + answered, guest + question.ask, host + question.reply]
        kinds.add(kind)
    return "\n".join(lines)


def introductions(draw: Draw) -> str:
    """People say their names and greet each other by them."""
    left, right, third = (name.to(draw.language) for name in draw.some(draw.one((VISITORS, ASSISTANTS)), 3))
    return draw.phrase(
        (
            f"{left}: Hello, my name is {left}.\n{right}: Nice to meet you, {left}! My name is {right}.\n"
            f"{left}: Nice to meet you, {right}!",
            f"{left} meets {right}. {left} says: I am {left}. {right} says: I am {right}. Now {left} knows {right}.",
            f"This is {left}, this is {right} and this is {third}. Hello {left}, hello {right}, hello {third}!",
            f"Good morning, {left}! Good morning, {right}! Good morning, {third}! We are {left}, {right} and {third}.",
        ),
        (
            f"{left}：你好，我叫{left}。\n{right}：很高兴认识你，{left}！我叫{right}。\n{left}：很高兴认识你，{right}！",
            f"{left}遇到了{right}。{left}说：我是{left}。{right}说：我是{right}。现在{left}认识{right}了。",
            f"这是{left}，这是{right}，这是{third}。你好，{left}！你好，{right}！你好，{third}！",
            f"早上好，{left}！早上好，{right}！早上好，{third}！我们是{left}、{right}和{third}。",
        ),
    )


def staff(draw: Draw) -> str:
    """Who works where, and the same asked back."""
    count = draw.number(2, 4)
    names = [name.to(draw.language) for name in draw.some(ASSISTANTS, count)]
    works = [work.to(draw.language) for work in draw.some(WORKPLACES, count)]
    told = draw.phrase(
        ("{} works at the {}.", "{} is the assistant of the {}.", "The assistant of the {1} is {0}."),
        ("{}在{}工作。", "{}是{}的助手。", "{1}的助手是{0}。"),
    )
    sentences = [told.format(name, work) for name, work in zip(names, works, strict=True)]
    for index in draw.some(range(count), draw.number(1, 2)):
        name, work = names[index], works[index]
        sentences.append(
            draw.phrase(
                (
                    f"Who works at the {work}? {name} works at the {work}.",
                    f"Where does {name} work? {name} works at the {work}.",
                    f"{name} says: My name is {name}. I work at the {work}.",
                    f"{name} says: I work at the {work}. My name is {name}.",
                ),
                (
                    f"谁在{work}工作？{name}在{work}工作。",
                    f"{name}在哪里工作？{name}在{work}工作。",
                    f"{name}说：我叫{name}，我在{work}工作。",
                    f"{name}说：我在{work}工作，我叫{name}。",
                ),
            )
        )
    return SPACE[draw.language].join(sentences)


def holders(draw: Draw) -> str:
    """Several people have things; who has which?"""
    count = draw.number(2, 4)
    people = [name.to(draw.language) for name in draw.some(VISITORS, count)] if draw.chance(0.5) else None
    people = people or context.story_people(draw, count)
    things = [thing.to(draw.language) for thing in draw.some(OBJECTS, count)]
    sentences = [
        f"{name} has the {thing}." if draw.english else f"{name}有{thing}。"
        for name, thing in zip(people, things, strict=True)
    ]
    asked = draw.some(range(count), draw.number(1, 2))
    for index in asked:
        question = f"Who has the {things[index]}?" if draw.english else f"谁有{things[index]}？"
        sentences += [question, sentences[index]]
    return SPACE[draw.language].join(sentences)


def whereabouts(draw: Draw) -> str:
    """Several things lie somewhere; where is which?"""
    count = draw.number(2, 4)
    things = [thing.to(draw.language) for thing in draw.some(OBJECTS, count)]
    boxes = [box.to(draw.language) for box in draw.some(CONTAINERS, count)]
    sentences = [
        f"The {thing} is in the {box}." if draw.english else f"{thing}在{box}里。"
        for thing, box in zip(things, boxes, strict=True)
    ]
    asked = draw.some(range(count), draw.number(1, 2))
    for index in asked:
        question = f"Where is the {things[index]}?" if draw.english else f"{things[index]}在哪里？"
        sentences += [question, sentences[index]]
    return SPACE[draw.language].join(sentences)


def said_again(draw: Draw) -> str:
    """A list of words, and the same list again in another layout."""
    chosen, _ = words.word_list(draw, draw.number(3, 6))
    shown = [word.to(draw.language) for word in chosen]
    text, stop = listing(shown, draw.language), "." if draw.english else "。"
    again = draw.phrase(
        ("Once more", "Say it again", "The same list", "Repeat"), ("再说一遍", "重复一次", "同样的清单", "再来一次")
    )
    match draw.number(0, 3):
        case 0:
            return "\n".join([*shown, (f"{again}: {text}" if draw.english else f"{again}：{text}") + stop])
        case 1:
            return f"{capital(text)}{stop}" + (f" {again}: {text}." if draw.english else f"{again}：{text}。")
        case 2:
            opening = "The words: " if draw.english else "这些词："
            return "\n".join([opening + text + stop, *shown])
    lines = [f"{index} {word}" if draw.english else f"{index}、{word}" for index, word in enumerate(shown, 1)]
    places = draw.some(range(len(shown)), 2)
    asked = [
        f"Number {place + 1} is {shown[place]}." if draw.english else f"第{place + 1}个是{shown[place]}。"
        for place in places
    ]
    return "\n".join([*lines, *asked])


def pairs_again(draw: Draw) -> str:
    """Pairs of words that belong together in this text only, each asked back."""
    chosen = [word.to(draw.language) for word in draw.some(WORDS, 6)]
    couples = list(zip(chosen[::2], chosen[1::2], strict=True))
    told = [f"{left} - {right}" if draw.english else f"{left}——{right}" for left, right in couples]
    again = draw.some(told, 3)
    return "\n".join([*told, *again])


def echo(draw: Draw) -> str:
    """Words and names of all kinds in random order, and the same again: only looking back tells what comes next."""
    told = []
    for _ in range(draw.number(1, 3)):
        # A name is always among them, so that this is none of the word lists that questions are asked about.
        mixed = [draw.one(VISITORS), draw.one(ASSISTANTS)]
        mixed += [draw.one(draw.one(ALL_KINDS)) for _ in range(draw.number(1, 4))]
        # Numbers too: their digits are tokens of their own, and copying them is half of sorting and comparing. Four of
        # them, so that they are none of the pairs and triples that questions are asked about.
        if draw.chance(0.5):
            mixed += [Pair(str(number), str(number)) for number in draw.some(range(1, 1000), 4)]
        draw.rng.shuffle(mixed)
        text = listing([word.to(draw.language) for word in mixed], draw.language)
        told.append(
            draw.phrase(
                (f"Call: {text}. Echo: {text}.", f"She reads: {text}. He repeats: {text}.", f"{text}. Again: {text}."),
                (f"喊：{text}。回声：{text}。", f"她念：{text}。他跟着念：{text}。", f"{text}。再一遍：{text}。"),
            )
        )
    return "\n".join(told)
