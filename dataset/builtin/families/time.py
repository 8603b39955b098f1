"""Questions about the calendar and the clock."""

from dataset.builtin.draw import Draw
from dataset.builtin.question import Question
from dataset.builtin.vocabulary import DAYS, HOURS, MONTHS, Pair

# (what is asked, the circle of names, steps on it): question phrasings and the one reply.
CALENDAR = {
    "day after": (DAYS, 1),
    "day before": (DAYS, -1),
    "month after": (MONTHS, 1),
    "month before": (MONTHS, -1),
}
CALENDAR_ASKS = {
    "day after": {
        "en": (
            "Which day comes after {x}?",
            "What day follows {x}?",
            "What is the day after {x}?",
            "Today is {x}. What day is tomorrow?",
            "If today is {x}, what day is it tomorrow?",
            "Which day is right after {x}?",
        ),
        "zh": (
            "{x}的后一天是星期几？",
            "{x}之后是星期几？",
            "{x}过后的第二天是星期几？",
            "今天是{x}，明天是星期几？",
            "如果今天是{x}，那么明天是星期几？",
            "{x}的下一天是星期几？",
        ),
    },
    "day before": {
        "en": (
            "Which day comes before {x}?",
            "What day is just before {x}?",
            "What is the day before {x}?",
            "Today is {x}. What day was yesterday?",
            "If today is {x}, what day was it yesterday?",
            "Which day is right before {x}?",
        ),
        "zh": (
            "{x}的前一天是星期几？",
            "{x}之前是星期几？",
            "{x}前面的那一天是星期几？",
            "今天是{x}，昨天是星期几？",
            "如果今天是{x}，那么昨天是星期几？",
            "{x}的上一天是星期几？",
        ),
    },
    "month after": {
        "en": (
            "Which month comes after {x}?",
            "What month follows {x}?",
            "What is the month after {x}?",
            "It is {x}. What is the next month?",
            "If it is {x} now, what is the next month?",
            "Which month is right after {x}?",
        ),
        "zh": (
            "{x}的下一个月是几月？",
            "{x}之后是几月？",
            "{x}过后是几月？",
            "现在是{x}，下个月是几月？",
            "如果现在是{x}，那么下个月是几月？",
            "{x}后面的月份是几月？",
        ),
    },
    "month before": {
        "en": (
            "Which month comes before {x}?",
            "What month is just before {x}?",
            "What is the month before {x}?",
            "It is {x}. What was the last month?",
            "If it is {x} now, what was the last month?",
            "Which month is right before {x}?",
        ),
        "zh": (
            "{x}的上一个月是几月？",
            "{x}之前是几月？",
            "{x}前面是几月？",
            "现在是{x}，上个月是几月？",
            "如果现在是{x}，那么上个月是几月？",
            "{x}前面的月份是几月？",
        ),
    },
}
CALENDAR_REPLIES = {
    "day after": {"en": "The day after {x} is {v}.", "zh": "{x}的后一天是{v}。"},
    "day before": {"en": "The day before {x} is {v}.", "zh": "{x}的前一天是{v}。"},
    "month after": {"en": "The month after {x} is {v}.", "zh": "{x}的下一个月是{v}。"},
    "month before": {"en": "The month before {x} is {v}.", "zh": "{x}的上一个月是{v}。"},
}
TO_WORDS = {
    "en": (
        "How do you say {d} in words?",
        "What is {d} in words?",
        "How do I read the time {d}?",
        "The clock shows {d}. What time is it?",
    ),
    "zh": ("{d}怎么读？", "{d}用文字怎么写？", "时间{d}怎么说？", "钟上显示{d}，现在几点？"),
}
TO_DIGITS = {
    "en": (
        "How do you write {t} in digits?",
        "What is {t} in digits?",
        "It is {t}. What does the digital clock show?",
        "Which digits stand for {t}?",
    ),
    "zh": ("{t}用数字怎么写？", "{t}写成数字是什么？", "现在是{t}，电子钟上显示什么？", "怎样用数字表示{t}？"),
}
MINUTES = (0, 15, 30)


def around(circle: tuple[Pair, ...], start: Pair, steps: int) -> Pair:
    """The name `steps` further on a circle of names."""
    return circle[(circle.index(start) + steps) % len(circle)]


def calendar_reply(kind: str, start: Pair, language: str, value: Pair | None = None) -> str:
    """The sentence that names the day or month `kind` (such as "day after") of `start`."""
    circle, steps = CALENDAR[kind]
    value = value or around(circle, start, steps)
    return CALENDAR_REPLIES[kind][language].format(x=start.to(language), v=value.to(language))


def calendar(draw: Draw) -> Question:
    """The day or month before or after another."""

    def attempt():
        kind = draw.one(tuple(CALENDAR))
        start = draw.one(CALENDAR[kind][0])
        index = draw.number(0, len(CALENDAR_ASKS[kind][draw.language]) - 1)
        return (kind, start, index), ("calendar", draw.language, kind, start.en, str(index))

    (kind, start, index), key = draw.keep(attempt)
    circle, steps = CALENDAR[kind]
    value = around(circle, start, steps)
    wrong = draw.one([other for other in circle if other not in (value, start)])
    return Question(
        family="calendar",
        language=draw.language,
        ask=CALENDAR_ASKS[kind][draw.language][index].format(x=start.to(draw.language)),
        reply=calendar_reply(kind, start, draw.language),
        keys=(key,),
        accepted=(value.to(draw.language),),
        wrong=calendar_reply(kind, start, draw.language, wrong),
        value=value.to(draw.language),
    )


def clock_words(hour: int, minute: int, language: str) -> str:
    """The time as people say it; `hour` counts from 0 for one o'clock to 11 for twelve."""
    now = HOURS[hour].to(language)
    if language == "zh":
        return now + {0: "整", 15: "一刻", 30: "半"}[minute]
    return {
        0: f"{now} o'clock",
        15: f"a quarter past {now}",
        30: f"half past {now}",
    }[minute]


def clock_digits(hour: int, minute: int) -> str:
    """The time as a digital clock shows it."""
    return f"{hour + 1}:{minute:02d}"


def clock(draw: Draw) -> Question:
    """The same time in digits and in words, either way."""

    def attempt():
        to_words = draw.chance(0.5)
        hour, minute, index = draw.number(0, 11), draw.one(MINUTES), draw.number(0, 3)
        key = ("clock", draw.language, "words" if to_words else "digits", clock_digits(hour, minute), str(index))
        return (to_words, hour, minute, index), key

    (to_words, hour, minute, index), key = draw.keep(attempt)
    digits, words = clock_digits(hour, minute), clock_words(hour, minute, draw.language)
    other = draw.one([choice for choice in MINUTES if choice != minute])
    asks = (TO_WORDS if to_words else TO_DIGITS)[draw.language]
    value = words if to_words else digits
    reply = "It is {}." if draw.english else "是{}。"
    wrong = clock_words(hour, other, draw.language) if to_words else clock_digits(hour, other)
    return Question(
        family="clock",
        language=draw.language,
        ask=asks[index].format(d=digits, t=words),
        reply=reply.format(value),
        keys=(key,),
        accepted=(value,),
        wrong=reply.format(wrong),
        value=value,
    )
