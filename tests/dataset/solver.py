"""An independent reader of the embedded questions: it finds the right answer from the prompt, the world and arithmetic.

It shares the word lists and the world with the generator, but none of its question code.
"""

import re

from dataset.builtin.vocabulary import (
    CATEGORIES,
    CONTAINERS,
    DAYS,
    HOURS,
    MONTHS,
    OPPOSITES,
    PETS,
    STRANGERS,
    WORDS,
    article,
)
from dataset.builtin.world import World

MINUTES = {
    "en": {
        0: "{h} o'clock",
        15: "a quarter past {h}",
        30: "half past {h}",
        45: "a quarter to {k}",
    },
    "zh": {0: "{h}整", 15: "{h}一刻", 30: "{h}半", 45: "{h}三刻"},
}
WORD_ANY = {word.en: word for word in WORDS} | {word.zh: word for word in WORDS}


def numbers(text: str) -> list[int]:
    """All whole numbers in the text."""
    return [int(found) for found in re.findall(r"\d+", text)]


def listed(text: str) -> list[str]:
    """The words of the list in a question."""
    known = sorted(WORD_ANY, key=len, reverse=True)
    pattern = re.compile("|".join(rf"\b{word}\b" if word.isascii() else word for word in known))
    return pattern.findall(re.split(r"[:：]", text.rpartition("清单：")[2] if "清单：" in text else text)[-1])


def person_in(world: World, text: str, language: str):
    """The first person of the world who is named in the text, or None."""
    found = [(text.find(person.name.to(language)), person) for person in world.people]
    found = [entry for entry in found if entry[0] >= 0]
    return min(found, key=lambda entry: entry[0])[1] if found else None


def facts_of(world: World, language: str) -> set[str]:
    """Every plain sentence that is true in the world, as the assistant would say it."""
    true: set[str] = set()
    for person in world.people:
        name, home = person.name.to(language), person.home.name.to(language)
        item, colour = person.item.to(language), person.colour.to(language)
        sibling, friend = world.sibling(person).name.to(language), world.friend(person).name.to(language)
        word = world.sibling_word(person, language)
        if language == "en":
            true |= {f"{name} lives in {home}.", f"{name} is {article(person.job.en)}."}
            true |= {f"{name} has {article(person.pet.en)}.", f"{name}'s {item} is {colour}."}
            true |= {f"{name}'s {word} is {sibling}.", f"{name}'s best friend is {friend}."}
            true |= {f"The {person.job.en} of {home} is {name}.", f"The {colour} {item} belongs to {name}."}
        else:
            true |= {f"{name}住在{home}。", f"{name}是一名{person.job.zh}。", f"{name}养了{person.pet.zh}。"}
            true |= {f"{name}的{item}是{colour}的。", f"{name}的{word}是{sibling}。", f"{name}的好朋友是{friend}。"}
            true |= {f"{home}的{person.job.zh}是{name}。", f"{colour}的{item}是{name}的。"}
    for place in world.places:
        name, goods, landmark, dish, festival = (
            part.to(language) for part in (place.name, place.goods, place.landmark, place.dish, place.festival)
        )
        if language == "en":
            true |= {f"The market of {name} sells {goods}.", f"In the north of {name} there is {landmark}."}
            true |= {f"People in {name} like to eat {dish}.", f"The festival of {name} is in {festival}."}
        else:
            true |= {f"{name}的集市卖{goods}。", f"{name}的北边有{landmark}。"}
            true |= {f"{name}的人喜欢吃{dish}。", f"{name}的节日在{festival}。"}
    return true


def clock_pairs(language: str) -> dict[str, str]:
    """Times in digits and in words, each to the other."""
    both = {}
    for hour in range(12):
        for minute, form in MINUTES[language].items():
            words = form.format(h=HOURS[hour].to(language), k=HOURS[(hour + 1) % 12].to(language))
            both[f"{hour + 1}:{minute:02d}"] = words
            both[words] = f"{hour + 1}:{minute:02d}"
    return both


def is_unknown(world: World, ask: str, language: str) -> bool:
    """Whether the question is about a stranger, or about something that no text tells of anybody."""
    stranger = any(name.to(language) in ask for name in STRANGERS)
    untold = (
        r"song|tall|old|phone|born|dream|much money|shoe|film|yesterday"
        if language == "en"
        else "歌|多高|多大|电话|出生|梦见|多少钱|鞋|电影|昨天"
    )
    return stranger or bool(re.search(untold, ask))


def solve(world: World, row: dict, facts: set[str]) -> list[str]:
    """The right answer(s) to an evaluation row: each accepted reply must contain or equal one of them."""
    language, family = row["language"], row["family"]
    ask = row["conversations"][-1]["content"]
    english = language == "en"
    match family:
        case "compare":
            largest = bool(re.search("larger|大", ask))
            return [str(max(numbers(ask)) if largest else min(numbers(ask)))]
        case "sort":
            return [(", " if english else "、").join(map(str, sorted(numbers(ask))))]
        case "addition":
            return [str(sum(numbers(ask)))]
        case "subtraction":
            return [str(numbers(ask)[0] - numbers(ask)[1])]
        case "count":
            return [str(len(listed(ask)))]
        case "position":
            words = listed(ask)
            place = 0 if re.search("first|第一", ask) else 1 if re.search("second|第二", ask) else -1
            return [words[place]]
        case "odd_one":
            kinds = {word.to(language): kind for kind, group in CATEGORIES for word in group}
            words = listed(ask)
            return [word for word in words if [kinds[other] for other in words].count(kinds[word]) == 1]
        case "opposite":
            both = {left.to(language): right.to(language) for pair in OPPOSITES for left, right in (pair, pair[::-1])}
            words = re.findall(r"[a-z]+" if english else "“(.+?)”", ask)
            return [both[[word for word in words if word in both][-1]]]
        case "translation":
            words = re.findall(r"[a-z]+" if english else "“(.+?)”", ask)
            found = next(WORD_ANY[word] for word in words if word in WORD_ANY)
            return [found.zh if english else found.en]
        case "spelling" | "instruction":
            words = re.findall(r"[a-z]+" if english else "“(.+?)”", ask)
            return [_formed(next(word for word in words if word in WORD_ANY), family, ask, english)]
        case "calendar":
            return [_calendar(ask, language)]
        case "clock":
            both = clock_pairs(language)
            return [both[max((time for time in both if re.search(rf"(?<![\d十]){re.escape(time)}", ask)), key=len)]]
        case "story":
            return [_story(world, ask, language)]
        case "persona":
            about_name = bool(re.search("name|Who|called|叫|谁|名字", ask))
            return [_persona(row["conversations"][0]["content"], about_name, english)]
        case "recall":
            return [_told(row["conversations"][0]["content"], english)]
    if family == "honesty" and is_unknown(world, ask, language):
        return ["I do not know." if english else "我不知道。"]
    return _fact(world, row, ask, language, facts)


def _formed(word: str, family: str, ask: str, english: bool) -> str:
    if family == "spelling":
        return ("-" if english else "、").join(word)
    if re.search("bracket|括号", ask):
        return f"In brackets: ( {word} )" if english else f"（{word}）"
    if re.search("star|星号", ask):
        return f"With stars: * {word} *" if english else f"*{word}*"
    if re.search("three|三", ask):
        return f"Three times: {word} {word} {word}" if english else word * 3
    return f"Twice: {word} {word}" if english else word * 2


def _calendar(ask: str, language: str) -> str:
    circle = next(c for c in (DAYS, MONTHS) if any(name.to(language) in ask for name in c))
    names = [name.to(language) for name in circle]
    start = max((name for name in names if name in ask), key=len)
    back = re.search("before|yesterday|last month|前|昨天|上一?个月|上一天", ask)
    steps = -1 if back else 2 if re.search("two days|后两天|后天|再过两天", ask) else 1
    return names[(names.index(start) + steps) % len(names)]


def _story(world: World, ask: str, language: str) -> str:
    story = re.split(r"(?<=[.。！]) ?", ask)
    body = "".join(part for part in story if "?" not in part and "？" not in part)
    if re.search("Who|谁", ask):
        names = [person.name.to(language) for person in world.people]
    else:
        names = [container.to(language) for container in CONTAINERS]
    return max(names, key=lambda name: body.rfind(name))


def _persona(system: str, about_name: bool, english: bool) -> str:
    if about_name:
        found = re.search(r"(?:name is|You are) ([A-Z]\w+)" if english else r"(?:你叫|名字叫|你是)(.+?)[，。]", system)
        return found[1]
    found = re.search(
        r"(?:at the|of the|The) (\w+)" if english else r"在(.+?)工作|，(.+?)的助手|^(.+?)有一位助手", system
    )
    return next(part for part in found.groups() if part)


def _told(said: str, english: bool) -> str:
    for name in PETS:
        if (article(name.en) if english else name.zh) in said:
            return article(name.en) if english else name.zh
    if english:
        return re.search(r"(?:name is|I am|colour is|I like|love most is) (\w+)", said)[1]
    return re.search(r"(?:我叫|名字是|颜色是|最喜欢|我最爱)(?!的)(.+?)。", said)[1]


def _fact(world: World, row: dict, ask: str, language: str, facts: set[str]) -> list[str]:
    """The reply must be a true sentence that names everything that the question names."""
    reply = row["answers"][0]
    assert reply in facts, f"{row['id']}: {reply!r} is not true"
    person = person_in(world, ask, language)
    if row["family"] == "two_step":
        friend = "friend" in ask or "朋友" in ask
        person = world.friend(person) if friend else world.sibling(person)
    named = [person.name] if person else [place.name for place in world.places if place.name.to(language) in ask]
    assert named or row["family"] == "reverse", f"{row['id']}: {ask!r} names nobody"
    assert all(name.to(language) in reply for name in named), f"{row['id']}: {reply!r} does not answer {ask!r}"
    return [reply]
