"""Questions about words: opposites, translation, spelling, form, and the words of a list."""

from dataset.builtin.draw import Draw, Key
from dataset.builtin.question import Question
from dataset.builtin.vocabulary import CATEGORIES, OPPOSITES, WORDS, Pair, listing

OPPOSITE_ASKS = {
    "en": (
        "What is the opposite of {w}?",
        "Which word is the opposite of {w}?",
        "What is the contrary of {w}?",
        "What word means the opposite of {w}?",
        "Can you give me the opposite of {w}?",
        "If something is not {w}, what is it?",
    ),
    "zh": (
        "“{w}”的反义词是什么？",
        "和“{w}”相反的词是什么？",
        "哪个词和“{w}”意思相反？",
        "“{w}”的反义词是哪个？",
        "与“{w}”相对的词是什么？",
        "“{w}”反过来是什么？",
    ),
}
TRANSLATION_ASKS = {
    "en": (
        "What is the Chinese word for {w}?",
        "How do you say {w} in Chinese?",
        "What does {w} mean in Chinese?",
        "What is {w} in Chinese?",
        "Can you translate {w} into Chinese?",
        "Which Chinese word means {w}?",
    ),
    "zh": (
        "“{w}”用英语怎么说？",
        "“{w}”的英语是什么？",
        "“{w}”翻译成英语是什么？",
        "英语里“{w}”怎么说？",
        "“{w}”的英文单词是什么？",
        "哪个英语单词的意思是“{w}”？",
    ),
}
SPELLING_ASKS = {
    "en": (
        "How do you spell {w}?",
        "What are the letters of {w}?",
        "Can you spell {w}?",
        "Which letters make the word {w}?",
        "How is {w} spelled?",
        "What is the spelling of {w}?",
    ),
    "zh": (
        "“{w}”由哪两个字组成？",
        "“{w}”是哪两个字？",
        "“{w}”拆开是哪两个字？",
        "“{w}”里有哪两个字？",
        "把“{w}”拆成单字是什么？",
        "“{w}”这个词怎么拆成字？",
    ),
}
FORM_TASKS = {
    "twice": {
        "en": ("Say {w} twice.", "Write {w} two times.", "Repeat {w} twice.", "Write the word {w} twice."),
        "zh": ("把“{w}”说两遍。", "“{w}”写两次。", "请重复“{w}”两次。", "请把“{w}”写两遍。"),
    },
    "brackets": {
        "en": ("Put {w} in brackets.", "Write {w} in brackets.", "Put brackets around {w}.", "Set {w} in brackets."),
        "zh": ("给“{w}”加上括号。", "把“{w}”放进括号里。", "请在括号里写“{w}”。", "用括号括住“{w}”。"),
    },
    "stars": {
        "en": (
            "Put {w} between stars.",
            "Write {w} with a star on each side.",
            "Put stars around {w}.",
            "Set {w} between two stars.",
        ),
        "zh": ("给“{w}”两边加上星号。", "把“{w}”放在两个星号中间。", "在“{w}”的两边写星号。", "用星号围住“{w}”。"),
    },
    "three": {
        "en": (
            "Say {w} three times.",
            "Write {w} three times.",
            "Repeat {w} three times.",
            "Say the word {w} three times.",
        ),
        "zh": ("把“{w}”说三遍。", "“{w}”写三次。", "请重复“{w}”三次。", "请把“{w}”写三遍。"),
    },
}
ODD_ASKS = {
    "en": (
        "Which word does not belong: {l}?",
        "Which is the odd one out: {l}?",
        "Which word does not fit: {l}?",
        "One word is different. Which one: {l}?",
    ),
    "zh": (
        "哪个词和别的不同类：{l}？",
        "下面哪个词不合群：{l}？",
        "找出不同类的词：{l}。",
        "有一个词不是同类，是哪个：{l}？",
    ),
}
COUNT_ASKS = {
    "en": (
        "How many things are in this list: {l}?",
        "How many words are there: {l}?",
        "How many items does this list have: {l}?",
        "I have a list: {l}. How many things are in it?",
    ),
    "zh": (
        "这个清单里有几样东西：{l}？",
        "下面一共有几个词：{l}？",
        "数一数有几样东西：{l}。",
        "我有一个清单：{l}。里面有几样东西？",
    ),
}
POSITION_ASKS = {
    "first": {
        "en": (
            "Which word is first: {l}?",
            "What is the first word of this list: {l}?",
            "Here is a list: {l}. What comes first?",
        ),
        "zh": ("哪个词排在第一：{l}？", "清单里的第一个词是什么：{l}？", "这里有一个清单：{l}。第一个是什么？"),
    },
    "second": {
        "en": (
            "Which word is second: {l}?",
            "What is the second word of this list: {l}?",
            "Here is a list: {l}. What comes second?",
        ),
        "zh": ("哪个词排在第二：{l}？", "清单里的第二个词是什么：{l}？", "这里有一个清单：{l}。第二个是什么？"),
    },
    "last": {
        "en": (
            "Which word is last: {l}?",
            "What is the last word of this list: {l}?",
            "Here is a list: {l}. What comes last?",
        ),
        "zh": ("哪个词排在最后：{l}？", "清单里的最后一个词是什么：{l}？", "这里有一个清单：{l}。最后一个是什么？"),
    },
}
POSITION_REPLIES = {
    "first": {"en": "The first word is {}.", "zh": "第一个词是{}。"},
    "second": {"en": "The second word is {}.", "zh": "第二个词是{}。"},
    "last": {"en": "The last word is {}.", "zh": "最后一个词是{}。"},
}


def shaped(word: str, shape: str, language: str) -> str:
    """The word as an instruction wants it."""
    match shape:
        case "twice":
            return f"Twice: {word} {word}" if language == "en" else word + word
        case "brackets":
            return f"In brackets: ( {word} )" if language == "en" else f"（{word}）"
        case "stars":
            return f"With stars: * {word} *" if language == "en" else f"*{word}*"
    return f"Three times: {word} {word} {word}" if language == "en" else word * 3


def spelled(word: str, language: str) -> str:
    """The word letter by letter, or character by character."""
    return ("-" if language == "en" else "、").join(word)


def word_list(draw: Draw, count: int) -> tuple[list[Pair], Key]:
    """`count` different words whose set belongs to the draw's split."""

    def attempt():
        words = draw.some(WORDS, count)
        return words, ("list", *sorted(word.en for word in words))

    return draw.keep(attempt)


def odd_list(draw: Draw) -> tuple[list[Pair], Pair, Key]:
    """Two words of one kind and one of another in random order, and the odd one."""

    def attempt():
        kind, other = draw.some(CATEGORIES, 2)
        odd = draw.one(other[1])
        words = [*draw.some(kind[1], 2), odd]
        draw.rng.shuffle(words)
        return (words, odd), ("list", *sorted(word.en for word in words))

    (words, odd), key = draw.keep(attempt)
    return words, odd, key


def _word_key(draw: Draw, relation: str, words: tuple[Pair, ...], phrasings: int) -> tuple[tuple[Pair, int], Key]:
    """A word and the index of a phrasing whose combination belongs to the draw's split."""

    def attempt():
        word, index = draw.one(words), draw.number(0, phrasings - 1)
        return (word, index), ("word", draw.language, relation, word.en, str(index))

    return draw.keep(attempt)


def opposite(draw: Draw) -> Question:
    """The opposite of an adjective."""
    both = {left: right for left, right in OPPOSITES} | {right: left for left, right in OPPOSITES}
    asks = OPPOSITE_ASKS[draw.language]
    (word, index), key = _word_key(draw, "opposite", tuple(both), len(asks))
    shown, value = word.to(draw.language), both[word].to(draw.language)
    wrong = draw.one([other for other in both if other not in (word, both[word])]).to(draw.language)
    reply = "The opposite of {} is {}." if draw.english else "“{}”的反义词是“{}”。"
    return Question(
        family="opposite",
        language=draw.language,
        ask=asks[index].format(w=shown),
        reply=reply.format(shown, value),
        keys=(key,),
        accepted=(value,),
        wrong=reply.format(shown, wrong),
        value=value,
    )


def translation(draw: Draw) -> Question:
    """A word in the other language."""
    asks = TRANSLATION_ASKS[draw.language]
    (word, index), key = _word_key(draw, "translation", WORDS, len(asks))
    other = "zh" if draw.english else "en"
    wrong = draw.one([one for one in WORDS if one is not word])
    reply = "The Chinese word for {} is {}." if draw.english else "“{}”的英语是“{}”。"
    return Question(
        family="translation",
        language=draw.language,
        ask=asks[index].format(w=word.to(draw.language)),
        reply=reply.format(word.to(draw.language), word.to(other)),
        keys=(key,),
        accepted=(word.to(other),),
        wrong=reply.format(word.to(draw.language), wrong.to(other)),
        value=word.to(other),
    )


def spelling(draw: Draw) -> Question:
    """The letters of an English word, the characters of a Chinese one."""
    asks = SPELLING_ASKS[draw.language]
    (word, index), key = _word_key(draw, "spelling", WORDS, len(asks))
    shown = word.to(draw.language)
    wrong = draw.one([one for one in WORDS if one is not word]).to(draw.language)
    return Question(
        family="spelling",
        language=draw.language,
        ask=asks[index].format(w=shown),
        reply=spelled(shown, draw.language),
        keys=(key,),
        wrong=spelled(wrong, draw.language),
        value=spelled(shown, draw.language),
    )


def instruction(draw: Draw) -> Question:
    """A word in a demanded form: twice, in brackets, between stars, three times."""
    shape = draw.one(tuple(FORM_TASKS))
    tasks = FORM_TASKS[shape][draw.language]
    (word, index), key = _word_key(draw, shape, WORDS, len(tasks))
    shown = word.to(draw.language)
    return Question(
        family="instruction",
        language=draw.language,
        ask=tasks[index].format(w=shown),
        reply=shaped(shown, shape, draw.language),
        keys=(key,),
        wrong=shown,
        frame="task",
        value=shaped(shown, shape, draw.language),
    )


def counted_aloud(words: list[str], language: str) -> str:
    """The words with their numbers: what a small model writes down before it says which one is where."""
    if language == "en":
        return ", ".join(f"{index} {word}" for index, word in enumerate(words, 1)) + "."
    return "，".join(f"{index}{word}" for index, word in enumerate(words, 1)) + "。"


def odd_one(draw: Draw) -> Question:
    """The word of another kind among three."""
    words, odd, key = odd_list(draw)
    shown = [word.to(draw.language) for word in words]
    reply = "The word {} does not belong." if draw.english else "“{}”和别的不同类。"
    others = [word for word in words if word is not odd]
    kinds = {word: kind.to(draw.language) for kind, group in CATEGORIES for word in group}
    thought = "{} is {}. " if draw.english else "{}是{}。"
    # Which kind comes twice, which once, and whose that is: three small steps that each look back at the one before.
    last = "Two are {}, one is {}: {}." if draw.english else "两个是{}，一个是{}：{}。"
    return Question(
        family="odd_one",
        language=draw.language,
        ask=draw.one(ODD_ASKS[draw.language]).format(l=listing(shown, draw.language)),
        reply=reply.format(odd.to(draw.language)),
        keys=(key,),
        accepted=(odd.to(draw.language),),
        reasoning="".join(thought.format(word.to(draw.language), kinds[word]) for word in words)
        + last.format(kinds[others[0]], kinds[odd], odd.to(draw.language)),
        wrong=reply.format(draw.one(others).to(draw.language)),
        value=odd.to(draw.language),
    )


def count(draw: Draw) -> Question:
    """How many words a list of two to six has."""
    number = draw.number(2, 6)
    words, key = word_list(draw, number)
    reply = "There are {} in the list." if draw.english else "清单里有{}样东西。"
    wrong = draw.one([other for other in range(2, 7) if other != number])
    return Question(
        family="count",
        language=draw.language,
        ask=draw.one(COUNT_ASKS[draw.language]).format(
            l=listing([word.to(draw.language) for word in words], draw.language)
        ),
        reply=reply.format(number),
        keys=(key,),
        accepted=(str(number),),
        wrong=reply.format(wrong),
        check="number",
        value=str(number),
    )


def position(draw: Draw) -> Question:
    """The first, second or last word of a list."""
    where = draw.one(tuple(POSITION_ASKS))
    words, key = word_list(draw, draw.number(3, 4))
    shown = [word.to(draw.language) for word in words]
    right = {"first": 0, "second": 1, "last": len(words) - 1}[where]
    reply = POSITION_REPLIES[where][draw.language]
    wrong = draw.one([word for index, word in enumerate(shown) if index != right])
    return Question(
        family="position",
        language=draw.language,
        ask=draw.one(POSITION_ASKS[where][draw.language]).format(l=listing(shown, draw.language)),
        reply=reply.format(shown[right]),
        keys=(key,),
        accepted=(shown[right],),
        reasoning=counted_aloud(shown, draw.language),
        wrong=reply.format(wrong),
        value=shown[right],
    )
