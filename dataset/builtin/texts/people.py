"""Texts about people and towns: portraits, town descriptions, notes, letters, diaries, visits, dialogues."""

from dataset.builtin.draw import Draw
from dataset.builtin.families import facts
from dataset.builtin.question import Question
from dataset.builtin.texts.statements import PERSON_FACTS, PLACE_FACTS, person_fact, person_names, place_fact
from dataset.builtin.vocabulary import DAYS, STRANGERS
from dataset.builtin.world import Person

FACTS = tuple(PERSON_FACTS)


def joined(draw: Draw, sentences: list[str]) -> str:
    """Sentences as one paragraph."""
    return (" " if draw.english else "").join(sentences)


def portrait(draw: Draw) -> str:
    """A paragraph about one person; later sentences may say "she" or "he"."""
    person = draw.one(draw.world.people)
    chosen = draw.some(FACTS, draw.number(4, 6))
    sentences = [person_fact(draw, person, fact) for fact in chosen]
    if draw.chance(0.35):
        sentences = [sentences[0], *(_with_pronoun(draw, person, sentence) for sentence in sentences[1:])]
    return joined(draw, sentences)


def _with_pronoun(draw: Draw, person: Person, sentence: str) -> str:
    """The sentence with a pronoun in place of a name at its beginning."""
    name = person.name.to(draw.language)
    if not draw.english:
        pronoun = "她" if person.female else "他"
        return pronoun + sentence[len(name) :] if sentence.startswith(name) else sentence
    if sentence.startswith(f"{name}'s "):
        return ("Her" if person.female else "His") + sentence[len(name) + 2 :]
    if sentence.startswith(f"{name} ") and not sentence.startswith(f"{name} and"):
        return ("She" if person.female else "He") + sentence[len(name) :]
    return sentence


def one_fact_of_many(draw: Draw) -> str:
    """The same kind of fact of several people, a line each."""
    fact = draw.one(FACTS)
    people = draw.some(draw.world.people, draw.number(5, 9))
    return "\n".join(person_fact(draw, person, fact) for person in people)


def town(draw: Draw) -> str:
    """A paragraph about a town and the people who live there."""
    place = draw.one(draw.world.places)
    name = place.name.to(draw.language)
    opening = draw.phrase(
        ("{} is a small town.", "This is the town of {}.", "Welcome to {}!", "Let me tell you about {}."),
        ("{}是一座小镇。", "这里是{}。", "欢迎来到{}！", "我来说说{}。"),
    )
    sentences = [opening.format(name)]
    sentences += [place_fact(draw, place, fact) for fact in draw.some(tuple(PLACE_FACTS), draw.number(2, 4))]
    people = draw.world.people_of(place)
    for person in draw.some(people, draw.number(1, len(people))):
        sentences.append(person_fact(draw, person, draw.one(("home", "job", "job"))))
    return joined(draw, sentences)


def towns_compared(draw: Draw) -> str:
    """The same kind of fact of several towns, a line each."""
    fact = draw.one(tuple(PLACE_FACTS))
    return "\n".join(place_fact(draw, place, fact) for place in draw.some(draw.world.places, draw.number(4, 7)))


def town_book(draw: Draw) -> str:
    """A page of a register: a line of key words for each person."""
    if draw.english:
        title = "From the town book:"
        form = "{n}: {k} in {p}, {a}, {ci}, {r} {s}, best friend {f}."
    else:
        title = "镇上的名册："
        form = "{n}：{p}的{k}，养了{a}，有{ci}，{r}是{s}，好朋友是{f}。"
    people = draw.some(draw.world.people, draw.number(2, 5))
    return "\n".join([title, *(form.format(**person_names(draw, person)) for person in people)])


def letter(draw: Draw) -> str:
    """A letter from a person to brother, sister or best friend."""
    person = draw.one(draw.world.people)
    names = person_names(draw, person)
    to_sibling = draw.chance(0.5)
    other = draw.world.sibling(person) if to_sibling else draw.world.friend(person)
    names["o"] = other.name.to(draw.language)
    names["q"] = other.home.name.to(draw.language)
    names["b"] = draw.world.sibling_word(other, draw.language)
    if draw.english:
        lines = [
            "Dear {o},",
            "you live in {q} and I live in {p}, so I am writing you a letter.",
            draw.one(("I still work here as {j}.", "I am happy as {j}.", "The people of {p} like my work as {j}.")),
            draw.one(("My {i} is still {c}.", "I still have {a}.", "As you know, I keep {a}.")),
            draw.one(("When will you visit {p}?", "Please write soon.", "I hope to see you in {q}.")),
            "Your " + ("{b}" if to_sibling else "best friend") + " {n}",
        ]
    else:
        lines = [
            "亲爱的{o}：",
            "你住在{q}，我住在{p}，所以我给你写信。",
            draw.one(("我还在这里当{k}。", "我当{k}很开心。", "{p}的人都喜欢我这个{k}。")),
            draw.one(("我的{i}还是{c}的。", "我还养着{a}。", "{a}还和我住在一起。")),
            draw.one(("你什么时候来{p}？", "请快点回信。", "希望在{q}见到你。")),
            "你的" + ("{b}" if to_sibling else "好朋友") + "{n}",
        ]
    return "\n".join(lines).format(**names)


def diary(draw: Draw) -> str:
    """A day in somebody's diary: a trip to a town and a meeting."""
    person = draw.one(draw.world.people)
    names = person_names(draw, person) | {"d": draw.one(DAYS).to(draw.language)}
    names["g"] = person.home.goods.to(draw.language)
    names["l"] = person.home.landmark.to(draw.language)
    names["w"] = ("her" if person.female else "his") if draw.english else ("她" if person.female else "他")
    if draw.english:
        sentences = [
            draw.one(("{d}. Today I went to {p}.", "{d}. I spent the day in {p}.", "{d}. We travelled to {p}.")),
            draw.one(("At the market I bought {g}.", "In the north of {p} I saw {l}.", "The market of {p} sells {g}.")),
            draw.one(
                ("There I met {n}, the {k}.", "I visited {n}, who lives there.", "{n}, the {k} of {p}, said hello.")
            ),
            draw.one(("{n} showed me {w} {c} {i}.", "{n} came with {a}.", "{n} told me about {w} {r} {s}.")),
            draw.one(("It was a good day.", "In the evening I was tired.", "I want to go there again.")),
        ]
    else:
        sentences = [
            draw.one(("{d}。今天我去了{p}。", "{d}。我在{p}待了一天。", "{d}。我们去{p}旅行。")),
            draw.one(("我在集市上买了{g}。", "我在{p}的北边看到了{l}。", "{p}的集市卖{g}。")),
            draw.one(("我在那里见到了{k}{n}。", "我拜访了住在那里的{n}。", "{p}的{k}{n}向我问好。")),
            draw.one(("{n}给我看了{w}那{c}的{i}。", "{n}说起了{w}养的{a}。", "{n}说起了{w}的{r}{s}。")),
            draw.one(("这是美好的一天。", "晚上我很累。", "我还想再去一次。")),
        ]
        sentences[3] = sentences[3].replace("{w}养的{a}", "家里养着{a}").replace("{w}那{c}的{i}", "{w}的{i}，是{c}的")
    return joined(draw, sentences).format(**names)


def visit(draw: Draw) -> str:
    """A person travels to brother, sister or friend: the facts of two people in one story."""
    person = draw.one(draw.world.people)
    to_sibling = draw.chance(0.5)
    other = draw.world.sibling(person) if to_sibling else draw.world.friend(person)
    names, others = person_names(draw, person), person_names(draw, other)
    if draw.english:
        tie = f"{names['n']}'s " + (names["r"] if to_sibling else "best friend")
        sentences = [
            f"{names['n']} lives in {names['p']}.",
            f"{tie} is {others['n']}.",
            f"{others['n']} lives in {others['p']}.",
            draw.one((f"So {names['n']} travels to {others['p']}.", f"{names['n']} takes the road to {others['p']}.")),
            draw.one(
                (
                    f"{others['n']} has {others['a']}.",
                    f"{others['n']} is {others['j']}.",
                    f"{others['n']}'s {others['i']} is {others['c']}.",
                )
            ),
            draw.one(("They eat together.", "They talk all evening.", "Both are very happy.")),
        ]
    else:
        tie = f"{names['n']}的" + (names["r"] if to_sibling else "好朋友")
        sentences = [
            f"{names['n']}住在{names['p']}。",
            f"{tie}是{others['n']}。",
            f"{others['n']}住在{others['p']}。",
            draw.one((f"所以{names['n']}去了{others['p']}。", f"{names['n']}出发去{others['p']}。")),
            draw.one(
                (
                    f"{others['n']}养了{others['a']}。",
                    f"{others['n']}是一名{others['j']}。",
                    f"{others['n']}的{others['i']}是{others['c']}的。",
                )
            ),
            draw.one(("他们一起吃饭。", "他们聊了一个晚上。", "两个人都很高兴。")),
        ]
    return joined(draw, sentences)


def fact_question(draw: Draw) -> Question:
    """A question about the world, of any family of facts."""
    return draw.one((facts.home, facts.job, facts.belonging, facts.relation, facts.reverse, facts.place))(draw)


def dialogue(draw: Draw) -> str:
    """Two people of the world ask and tell each other things."""
    first, second = (person.name.to(draw.language) for person in draw.some(draw.world.people, 2))
    colon = ": " if draw.english else "："
    lines = []
    for _ in range(draw.number(2, 4)):
        question = facts.unknown(draw) if draw.chance(0.12) else fact_question(draw)
        lines += [f"{first}{colon}{question.ask}", f"{second}{colon}{question.reply}"]
    return "\n".join(lines)


def strangers(draw: Draw) -> str:
    """What nobody knows: people from elsewhere, and things that nobody has written down."""
    name = draw.one(STRANGERS).to(draw.language)
    person = draw.one(draw.world.people).name.to(draw.language)
    sentences = [
        draw.phrase(
            ("Nobody here knows {}.", "There is no {} in our towns.", "I have never heard of {}."),
            ("这里没有人认识{}。", "我们的镇上没有{}这个人。", "我从来没有听说过{}。"),
        ).format(name),
        draw.phrase(
            ("I do not know where {} lives.", "I do not know what {} does.", "I do not know which pet {} has."),
            ("我不知道{}住在哪里。", "我不知道{}是做什么的。", "我不知道{}养了什么。"),
        ).format(name),
        draw.phrase(
            (
                "Nobody has written down how old {} is.",
                "I do not know how tall {} is.",
                "What {} dreams at night nobody knows.",
            ),
            ("没有人写下{}的年龄。", "我不知道{}有多高。", "没有人知道{}夜里梦见什么。"),
        ).format(person),
    ]
    return joined(draw, sentences)
