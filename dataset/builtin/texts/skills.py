"""The skills told as text: number lines, sorting, lists, calendar, clock, spelling, glossaries, stories, sums."""

from collections.abc import Callable

from dataset.builtin.draw import Draw
from dataset.builtin.families import context, numbers, steps, time, words
from dataset.builtin.question import Question
from dataset.builtin.vocabulary import (
    ASSISTANTS,
    CATEGORIES,
    COLOURS,
    CONTAINERS,
    DAYS,
    MONTHS,
    OBJECTS,
    OPPOSITES,
    PETS,
    VISITORS,
    WORDS,
    WORKPLACES,
    capital,
    listing,
)


def lines(draw: Draw, make: Callable[[Draw], str], low: int, high: int) -> str:
    """Between `low` and `high` lines of one kind."""
    return "\n".join(make(draw) for _ in range(draw.number(low, high)))


def comparison(draw: Draw) -> str:
    """Which of two numbers is larger, with the reason half of the time."""
    first, second, _ = numbers.compared_pair(draw)
    large, small = max(first, second), min(first, second)
    return draw.phrase(
        (
            f"{large} is larger than {small}.",
            f"{small} is smaller than {large}.",
            f"Of {first} and {second}, {large} is larger.",
            f"{first} and {second}: the larger number is {large}.",
            f"{first} and {second}: the smaller number is {small}.",
        ),
        (
            f"{large}比{small}大。",
            f"{small}比{large}小。",
            f"{first}和{second}相比，{large}更大。",
            f"{first}和{second}相比，{small}更小。",
            f"{first}和{second}：{large}更大。",
        ),
    )


def sorting(draw: Draw) -> str:
    """Three numbers before and after sorting."""
    triple, _ = numbers.number_triple(draw)
    before = listing([str(number) for number in triple], draw.language)
    after = listing([str(number) for number in sorted(triple)], draw.language)
    return draw.phrase(
        (
            f"Sorted, {before} becomes {after}.",
            f"The numbers {before} in order: {after}.",
            f"From small to large: {before} -> {after}.",
        ),
        (f"{before}从小到大是{after}。", f"把{before}排好：{after}。", f"排序：{before}，变成{after}。"),
    )


def number_line(draw: Draw) -> str:
    """Counting on or back from some number."""
    start, step = draw.number(1, 980), draw.one((1, 1, 2, 10))
    row = [start + step * index for index in range(draw.number(5, 9))]
    if draw.chance(0.3):
        row.reverse()
    text = listing([str(number) for number in row], draw.language)
    return draw.phrase((f"Count: {text}.", f"{text}."), (f"数数：{text}。", f"{text}。"))


def sum_line(draw: Draw) -> str:
    """A sum or a difference."""
    first, second, _ = numbers.operands(draw)
    if draw.chance(0.5):
        return numbers.equation(first, second, "+", first + second, draw.language)
    first, second = max(first, second), min(first, second)
    return numbers.equation(first, second, "-", first - second, draw.language)


def worked_sum(draw: Draw) -> str:
    """An addition or a subtraction done digit by digit."""
    first, second, _ = numbers.operands(draw)
    sign = draw.one("+-")
    first, second = (first, second) if sign == "+" else (max(first, second), min(first, second))
    result = first + second if sign == "+" else first - second
    told = numbers.worked(first, second, sign, draw.language)
    line = numbers.equation(first, second, sign, result, draw.language)
    if draw.english:
        start = f"We add {first} and {second}" if sign == "+" else f"We take {second} from {first}"
        return f"{start} from the right: {told} So {line}."
    start = f"把{first}和{second}相加" if sign == "+" else f"从{first}里减去{second}"
    return f"从右边起{start}：{told}所以{line}。"


def list_facts(draw: Draw) -> str:
    """A list with its length and some of its places."""
    chosen, _ = words.word_list(draw, draw.number(2, 6))
    shown = [word.to(draw.language) for word in chosen]
    text = listing(shown, draw.language)
    told = []
    if draw.chance(0.7):
        told.append(draw.phrase((f"There are {len(shown)} in the list.",), (f"清单里有{len(shown)}样东西。",)))
    for where, index in draw.some((("first", 0), ("second", 1), ("last", -1)), draw.number(1, 3)):
        told.append(words.POSITION_REPLIES[where][draw.language].format(shown[index]))
    draw.rng.shuffle(told)
    return draw.phrase((f"Here is a list: {text}. ",), (f"这里有一个清单：{text}。",)) + (
        " ".join(told) if draw.english else "".join(told)
    )


def counting_up(draw: Draw) -> str:
    """A list counted aloud."""
    chosen, _ = words.word_list(draw, draw.number(2, 6))
    shown = [word.to(draw.language) for word in chosen]
    if draw.english:
        told = ", ".join(f"{index} {word}" for index, word in enumerate(shown, 1))
        return f"Let us count: {told}. There are {len(shown)} in the list."
    told = "，".join(f"{index}{word}" for index, word in enumerate(shown, 1))
    return f"数一数：{told}。清单里有{len(shown)}样东西。"


def odd_one_out(draw: Draw) -> str:
    """Three words, two of a kind, with the reason why one does not belong."""
    chosen, odd, _ = words.odd_list(draw)
    rest = [word for word in chosen if word is not odd]
    kinds = {word: kind for kind, group in CATEGORIES for word in group}
    text = listing([word.to(draw.language) for word in chosen], draw.language)
    left, right = (word.to(draw.language) for word in rest)
    name, own, others = odd.to(draw.language), kinds[odd].to(draw.language), kinds[rest[0]].to(draw.language)
    if draw.english:
        reason = f"The {name} is {own}; {left} and {right} are each {others}."
        return f"{capital(text)}: the word {name} does not belong. {reason}"
    return f"{text}：“{name}”和别的不同类。{name}是{own}，{left}和{right}是{others}。"


def kinds_of_things(draw: Draw) -> str:
    """What kind of thing several words stand for."""
    kind, group = draw.one(CATEGORIES)
    told = []
    for word in draw.some(group, draw.number(3, 6)):
        name, own = word.to(draw.language), kind.to(draw.language)
        told.append(
            f"{capital('an ' + name if name[0] in 'aeiou' else 'a ' + name)} is {own}."
            if draw.english
            else f"{name}是一种{own}。"
        )
    return (" " if draw.english else "").join(told)


def opposites(draw: Draw) -> str:
    """Adjectives and their opposites."""
    told = []
    for pair in draw.some(OPPOSITES, draw.number(3, 6)):
        left, right = (word.to(draw.language) for word in (pair if draw.chance(0.5) else pair[::-1]))
        told.append(
            draw.phrase(
                (
                    f"The opposite of {left} is {right}.",
                    f"What is not {left} is {right}.",
                    f"{capital(left)} and {right} are opposites.",
                ),
                (f"“{left}”的反义词是“{right}”。", f"“{left}”和“{right}”相反。", f"“{left}”与“{right}”意思相反。"),
            )
        )
    return "\n".join(told)


def glossary(draw: Draw) -> str:
    """A page of a small dictionary."""
    told = []
    form = draw.phrase(
        ("The Chinese word for {e} is {z}.", "{e}: {z}", "{e} is {z} in Chinese."),
        ("“{z}”的英语是“{e}”。", "{z}：{e}", "英语把“{z}”叫作“{e}”。"),
    )
    for word in draw.some(WORDS, draw.number(5, 9)):
        told.append(capital(form.format(e=word.en, z=word.zh)) if draw.english else form.format(e=word.en, z=word.zh))
    return "\n".join(told)


def spelling(draw: Draw) -> str:
    """How some words are written."""
    form = draw.phrase(
        ("{w} is spelled {s}.", "{w}: {s}", "The letters of {w} are {s}."),
        ("“{w}”拆成字是：{s}。", "{w}：{s}", "“{w}”由{s}两个字组成。"),
    )
    told = []
    for word in draw.some(WORDS, draw.number(4, 7)):
        shown = word.to(draw.language)
        told.append(form.format(w=shown, s=words.spelled(shown, draw.language)))
    return "\n".join(told)


def forms(draw: Draw) -> str:
    """Words twice, in brackets, between stars, three times."""
    names = {
        "twice": ("twice", "说两遍"),
        "brackets": ("in brackets", "加上括号"),
        "stars": ("between stars", "加上星号"),
        "three": ("three times", "说三遍"),
    }
    told = []
    for _ in range(draw.number(4, 7)):
        shape = draw.one(tuple(names))
        shown = draw.one(WORDS).to(draw.language)
        result = words.shaped(shown, shape, draw.language)
        told.append(
            f"{capital(shown)} {names[shape][0]}: {result}" if draw.english else f"“{shown}”{names[shape][1]}：{result}"
        )
    return "\n".join(told)


def calendar(draw: Draw) -> str:
    """Neighbouring days or months."""
    kinds = draw.one((("day after", "day before"), ("month after", "month before")))
    told = []
    for _ in range(draw.number(4, 7)):
        kind = draw.one(kinds)
        told.append(time.calendar_reply(kind, draw.one(time.CALENDAR[kind][0]), draw.language))
    return "\n".join(told)


def echo(draw: Draw) -> str:
    """Words in random order and the same words again: nothing but looking back tells what comes next.

    A model of this size learns to copy from its context late, or not at all, unless some text needs it this much.
    """
    told = []
    for _ in range(draw.number(2, 3)):
        # A name is always among them, so that no row is one of the word lists that questions are asked about.
        mixed = [draw.one(pool) for pool in (VISITORS, ASSISTANTS)] + [
            draw.one(draw.one((WORDS, COLOURS, OBJECTS, CONTAINERS, WORKPLACES, PETS, VISITORS, ASSISTANTS)))
            for _ in range(draw.number(3, 6))
        ]
        draw.rng.shuffle(mixed)
        text = (", " if draw.english else "、").join(word.to(draw.language) for word in mixed)
        told.append(
            draw.phrase(
                (
                    f"Call: {text}. Echo: {text}.",
                    f"She reads: {text}. He repeats: {text}.",
                    f"Once: {text}. Again: {text}.",
                ),
                (f"喊：{text}。回声：{text}。", f"她念：{text}。他跟着念：{text}。", f"一遍：{text}。再一遍：{text}。"),
            )
        )
    return "\n".join(told)


def rhyme(draw: Draw) -> str:
    """The days of the week or the months in order, from any one of them."""
    circle = draw.one((DAYS, MONTHS))
    start = draw.number(0, len(circle) - 1)
    names = [circle[(start + index) % len(circle)].to(draw.language) for index in range(len(circle))]
    opening = draw.phrase(
        ("The days of the week: " if circle is DAYS else "The months of the year: ",),
        ("一周的日子：" if circle is DAYS else "一年的月份：",),
    )
    return opening + listing(names, draw.language) + ("." if draw.english else "。")


def clock(draw: Draw) -> str:
    """Times in digits and words."""
    told = []
    form = draw.phrase(
        ("{d} is {t}.", "{d}: {t}", "When the clock shows {d}, it is {t}.", "It is {t}. It is {d}."),
        ("{d}是{t}。", "{d}：{t}", "钟上显示{d}，就是{t}。", "现在是{t}，也就是{d}。"),
    )
    for _ in range(draw.number(4, 7)):
        hour, minute = draw.number(0, 11), draw.one(time.MINUTES)
        shown, said = time.clock_digits(hour, minute), time.clock_words(hour, minute, draw.language)
        told.append(form.format(d=shown, t=said))
    return "\n".join(told)


def tale(draw: Draw) -> str:
    """One or two short stories, each with its consequence."""
    told = []
    for _ in range(draw.number(1, 3)):
        question = context.story(draw)
        body = question.ask
        if draw.chance(0.6):
            mark = ". " if draw.english else "。"
            body = body.rpartition(mark)[0] + mark.strip()
            body += " Now " if draw.english else "现在"
            reply = question.reply
            told.append(body + (reply[0].lower() + reply[1:] if reply.startswith("The ") else reply))
        else:
            told.append(body + (" " if draw.english else "") + question.reply)
    return "\n".join(told)


def two_steps(draw: Draw) -> str:
    """From a person over brother, sister or friend to a fact, told as a chain."""
    told = []
    for _ in range(draw.number(2, 4)):
        question = steps.two_step(draw)
        told.append(question.reasoning)
    return "\n".join(told)


def question_text(draw: Draw, question: Question) -> str:
    """A question with its answer as two lines of prose."""
    ask, answer = ("Question: ", "Answer: ") if draw.english else ("问：", "答：")
    thought = question.reasoning and question.reasoning + (" " if draw.english else "")
    return f"{ask}{question.ask}\n{answer}{thought}{question.reply}"
