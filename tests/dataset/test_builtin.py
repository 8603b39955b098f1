"""The embedded corpus: the same bytes everywhere, true, disjoint, balanced, and in the formats that users bring."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.builtin import sizes
from dataset.builtin.corpus import FRIENDLY_ASKS
from dataset.builtin.draw import Draw, split_of
from dataset.builtin.families import FAMILIES
from dataset.builtin.families.multi_step import MULTI_STEP
from dataset.builtin.families.numbers import worked
from dataset.builtin.question import FRAMES
from dataset.builtin.store import ensure_builtin_corpus
from dataset.builtin.vocabulary import VISITORS, WORDS
from dataset.builtin.world import build_world
from dataset.tools import TOOL_SCHEMAS, run_tool
from tests.dataset.solver import facts_of, solve

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    *("pretrain.train", "pretrain.val", "midtrain.train", "midtrain.val", "sft.train", "sft.val"),
    *("dpo.train", "dpo.val", "rl.train", "rl.val", "eval.val", "eval.test"),
}
FREE = {"addition", "subtraction"}
HAN = "\u4e00-\u9fff"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "builtin"
    ensure_builtin_corpus(path)
    return path


@pytest.fixture(scope="module")
def rows(folder):
    return {name: [json.loads(line) for line in (folder / f"{name}.jsonl").open(encoding="utf-8")] for name in NAMES}


@pytest.fixture(scope="module")
def world():
    return build_world()


def digest(folder: Path) -> str:
    """One hash over the names and bytes of all files."""
    whole = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        whole.update(path.name.encode() + path.read_bytes())
    return whole.hexdigest()


def run_python(code: str, *arguments: str, hash_seed: str = "0") -> subprocess.Popen:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment)


WRITE = "import sys; from dataset.builtin.store import ensure_builtin_corpus; ensure_builtin_corpus(sys.argv[1])"


# ---- writing ----


def test_same_bytes_whatever_the_hash_seed_even_from_two_processes_at_once(folder, tmp_path):
    target = tmp_path / "shared"
    both = [run_python(WRITE, str(target), hash_seed=seed) for seed in ("1", "12345")]
    assert [process.wait() for process in both] == [0, 0]
    assert digest(target) == digest(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["shared"], "temporary folders are left behind"


@pytest.fixture
def small(monkeypatch):
    """A corpus of few rows, where only the writing matters."""
    for name, value in list(vars(sizes).items()):
        if name.endswith(("_ROWS", "_QUESTIONS")):
            monkeypatch.setattr(sizes, name, (8,) * len(value) if isinstance(value, tuple) else 8)


def test_second_call_writes_nothing_and_damage_is_repaired(small, tmp_path):
    target = tmp_path / "corpus"
    paths = ensure_builtin_corpus(target)
    whole = digest(target)
    assert set(paths) == NAMES and all(path.is_file() for path in paths.values())
    before = {path: path.stat().st_mtime_ns for path in paths.values()}
    assert ensure_builtin_corpus(target) == paths
    assert {path: path.stat().st_mtime_ns for path in paths.values()} == before
    paths["sft.train"].write_text("", encoding="utf-8")
    ensure_builtin_corpus(target)
    assert digest(target) == whole


def test_outdated_corpus_is_replaced_and_other_seeds_tell_the_same_world(small, tmp_path, world):
    target = tmp_path / "corpus"
    ensure_builtin_corpus(target)
    whole = digest(target)
    stamp = json.loads((target / "stamp.json").read_text(encoding="utf-8"))
    (target / "stamp.json").write_text(json.dumps(stamp | {"generator": "older"}), encoding="utf-8")
    (target / "eval.val.jsonl").unlink()
    ensure_builtin_corpus(target)
    assert digest(target) == whole
    paths = ensure_builtin_corpus(target, seed=1)
    assert digest(target) != whole
    facts = {language: facts_of(world, language) for language in ("en", "zh")}
    for line in paths["eval.val"].open(encoding="utf-8"):
        row = json.loads(line)
        if row["family"] in ("home", "relation"):
            assert row["answers"][0] in facts[row["language"]]


def test_foreign_folders_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="holds something else than the embedded corpus"):
        ensure_builtin_corpus(tmp_path)
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_samples_are_printed(folder):
    command = [sys.executable, "-m", "dataset.builtin", "--output", str(folder), "--samples", "12"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.count("\n--- ") == 12 and "pretrain.train" in printed


# ---- formats ----


def check_conversation(messages: list[dict]) -> None:
    """Fields and order as users bring them, JSON strings that load, tools that were really run."""
    assert messages[-1]["role"] == "assistant"
    tools: set[str] = set()
    for index, entry in enumerate(messages):
        allowed = {"system": {"tools"}, "assistant": {"reasoning_content", "tool_calls"}}.get(entry["role"], set())
        assert {"role", "content"} <= set(entry) <= {"role", "content"} | allowed
        assert all(isinstance(value, str) for value in entry.values())
        before = messages[index - 1]["role"] if index else "start"
        assert (
            before
            in {
                "system": ("start",),
                "user": ("start", "system", "assistant"),
                "assistant": ("user", "tool"),
                "tool": ("assistant",),
            }[entry["role"]]
        )
        if "tools" in entry:
            schemas = json.loads(entry["tools"])
            assert all(schema == TOOL_SCHEMAS[schema["function"]["name"]] for schema in schemas)
            tools = {schema["function"]["name"] for schema in schemas}
        if "tool_calls" in entry:
            (call,) = json.loads(entry["tool_calls"])
            assert set(call) == {"name", "arguments"} and call["name"] in tools
            if index + 1 < len(messages):
                assert messages[index + 1]["content"] == run_tool(call["name"], call["arguments"])
        if entry["role"] == "assistant":
            assert entry["content"] or "tool_calls" in entry


def test_rows_have_exactly_the_formats_that_users_bring(rows):
    for name, entries in rows.items():
        for row in entries:
            if name.startswith("pretrain") or (name.startswith("midtrain") and "text" in row):
                assert set(row) == {"text"} and row["text"].strip() == row["text"] != ""
            elif name.startswith(("midtrain", "sft")):
                assert set(row) == {"conversations"}
                check_conversation(row["conversations"])
            elif name.startswith("rl"):
                assert set(row) == {"conversations", "gt", "family"}
                check_conversation(row["conversations"])
                assert [type(value) for value in row["gt"]] == [str]
                assert row["gt"][0] in row["conversations"][-1]["content"]
    assert {"text", "conversations"} == {key for row in rows["midtrain.train"] for key in row}


def test_preference_pairs_share_the_prompt_and_differ_in_the_end(rows):
    for row in rows["dpo.train"] + rows["dpo.val"]:
        assert set(row) == {"chosen", "rejected"}
        chosen, rejected = row["chosen"], row["rejected"]
        check_conversation(chosen)
        assert len(chosen) == len(rejected) and chosen[:-1] == rejected[:-1] and chosen[-1] != rejected[-1]
        assert rejected[-1]["role"] == "assistant"


def test_evaluation_rows_have_the_fields_of_a_question(rows):
    fields = {"id", "family", "language", "conversations", "answers", "check", "free_arithmetic"}
    for name in ("eval.val", "eval.test"):
        assert len({row["id"] for row in rows[name]}) == len(rows[name])
        for row in rows[name]:
            assert set(row) - {"tool_call"} == fields
            assert row["check"] in ("exact", "number", "tool_call")
            assert ("tool_call" in row) == (row["check"] == "tool_call")
            assert row["conversations"][-1]["role"] == "user" and row["language"] in ("en", "zh")
            assert row["free_arithmetic"] == (row["family"] in FREE)
            check_conversation([*row["conversations"], {"role": "assistant", "content": row["answers"][0]}])
            if row["check"] == "number":
                assert len(re.findall(r"\d+", row["answers"][0])) == 1


# ---- balance ----


def test_each_family_has_enough_questions_and_no_reply_answers_too_many(rows):
    groups = defaultdict(list)
    for row in rows["eval.test"]:
        groups[row["family"], row["language"]].append(row)
    assert len({family for family, _ in groups} - FREE) >= 14
    assert set(groups) == {(family, language) for family in FAMILIES for language in ("en", "zh")}
    for (family, language), questions in groups.items():
        assert len(questions) == sizes.TEST_QUESTIONS >= 100
        prompts = {json.dumps(row["conversations"], ensure_ascii=False) for row in questions}
        assert len(prompts) == len(questions)
        replies = Counter(answer for row in questions for answer in {answer.casefold() for answer in row["answers"]})
        assert replies.most_common(1)[0][1] <= 0.30 * len(questions), (family, language, replies.most_common(1))


def test_languages_are_about_half_each(rows):
    for name, entries in rows.items():
        chinese = sum(bool(re.search(f"[{HAN}]", json.dumps(row, ensure_ascii=False))) for row in entries)
        assert 0.45 < chinese / len(entries) < 0.62, name  # English glossaries contain Chinese words


# ---- truth ----


def test_every_evaluation_answer_follows_from_the_prompt_and_the_world(rows, world):
    facts = {language: facts_of(world, language) for language in ("en", "zh")}
    for row in rows["eval.test"] + rows["eval.val"]:
        if row["check"] == "tool_call":
            call = row["tool_call"]
            result = run_tool(call["name"], call["arguments"])
            assert not result.startswith("error") and all(result in answer for answer in row["answers"])
            ask = row["conversations"][-1]["content"]
            for argument in re.findall(r"\d+", call["arguments"].get("expression", "")):
                assert argument in ask
            assert call["arguments"].get("name", "") in ask
            continue
        right = solve(world, row, facts[row["language"]])
        answers = [answer.casefold().rstrip(".。") for answer in row["answers"]]
        wanted = right[0].casefold().rstrip(".。")
        assert len(right) == 1 and all(wanted in answer or answer in wanted for answer in answers), row
        if row["check"] == "number":
            assert re.findall(r"\d+", row["answers"][0]) == right


@given(st.integers(10, 999), st.integers(10, 999), st.sampled_from("+-"), st.sampled_from(["en", "zh"]))
def test_every_step_of_a_worked_sum_is_true_and_follows_from_the_last(first, second, sign, language):
    first, second = max(first, second), min(first, second)
    told = worked(first, second, sign, language).replace("，", ",").replace("：", ":").replace("。", ".")
    carry, rest = 0, ""
    for place, step in enumerate(told.rstrip(".").split(",")):
        done, _, so_far = step.partition(":")
        terms, result = done.split("=")
        numbers = [int(term) for term in terms.split(sign)]
        left, right = (number // 10**place % 10 for number in (first, second))
        borrowed = 10 * (sign == "-" and left < right + carry)
        assert numbers == [left + borrowed, right, carry][: 2 + bool(carry)]
        total = sum(numbers) if sign == "+" else numbers[0] - sum(numbers[1:])
        assert int(result) == total >= 0
        carry = total // 10 if sign == "+" else borrowed // 10
        rest = str(total % 10) + rest
        assert not place or so_far.strip()[-place - 1 :] == rest
    assert int(so_far) == (first + second if sign == "+" else first - second)


@pytest.mark.parametrize("ask", MULTI_STEP, ids=lambda ask: ask.__name__)
def test_several_calls_lead_to_what_is_true_of_the_world(world, ask):
    for language in ("en", "zh"):
        draw = Draw(world, language, "train", random.Random(7))
        for _ in range(100):
            question = ask(draw)
            assert [run_tool(use.name, use.arguments) for use in question.uses] == [use.result for use in question.uses]
            named = [person for person in world.people if person.name.to(language) in question.ask]
            field = question.family.removesuffix("_sum")
            right = str(sum(int(getattr(person, field)) for person in named))
            assert len(named) == 2 and question.value == right == re.findall(r"\d+", question.reply)[0]
            assert right not in question.ask and len(question.uses) == 3


def test_friendly_answers_are_asked_for_in_preferences_only(rows):
    """And there the friendly one is better where it is asked for, the plain one where it is not; both say the same."""
    wishes = [form.replace("{}", "").strip() for forms in FRIENDLY_ASKS.values() for form in forms]
    asks_kindly = re.compile("|".join(map(re.escape, wishes)))
    assert not asks_kindly.search("\n".join(words_of(rows, NAMES - {"dpo.train", "dpo.val"})))
    pairs = [[row[side][-1]["content"] for side in ("chosen", "rejected")] for row in rows["dpo.train"]]
    asked = [bool(asks_kindly.search(row["chosen"][-2]["content"])) for row in rows["dpo.train"]]
    assert 0.27 < sum(asked) / len(asked) < 0.33
    friendly = re.compile("Of course! |当然！")
    for (chosen, rejected), is_asked in zip(pairs, asked, strict=True):
        assert not is_asked or (friendly.match(chosen) and friendly.sub("", chosen) == rejected)
        assert is_asked or not friendly.match(chosen)
    turned = [chosen for (chosen, rejected), is_asked in zip(pairs, asked, strict=True) if friendly.match(rejected)]
    assert 0.07 < len(turned) / len(pairs) < 0.13


def test_fact_sentences_of_the_prose_are_true(rows, world):
    """Plain sentences of the forms that state facts occur with true values only, and all of them often."""
    facts = {language: facts_of(world, language) for language in ("en", "zh")}
    people = {language: "|".join(person.name.to(language) for person in world.people) for language in ("en", "zh")}
    places = {language: "|".join(place.name.to(language) for place in world.places) for language in ("en", "zh")}
    forms = {
        "en": rf"(?<![\w'] )\b(?:{people['en']})"
        rf"(?: lives in (?:{places['en']})|'s (?:best friend|sister|brother) is (?:{people['en']}))\.",
        "zh": f"(?:{people['zh']})(?:住在(?:{places['zh']})|的(?:好朋友|姐姐|妹妹|哥哥|弟弟)是(?:{people['zh']}))。",
    }
    text = "\n".join(row["text"] for row in rows["pretrain.train"])
    for language, form in forms.items():
        said = Counter(re.findall(form, text))
        assert set(said) <= facts[language], set(said) - facts[language]
        wanted = {fact for fact in facts[language] if re.fullmatch(form, fact)}
        assert len(wanted) == 120 and min(said[fact] for fact in wanted) >= 10  # in this form alone


def test_the_world_is_as_unambiguous_as_it_claims(world):
    assert len({(person.job, person.home.name) for person in world.people}) == len(world.people)
    assert len({(person.colour, person.item) for person in world.people}) == len(world.people)
    assert len({person.age for person in world.people}) == len(world.people)
    for person in world.people:
        assert world.sibling(world.sibling(person)) is person is world.friend(world.friend(person))
        assert len({person, world.sibling(person), world.friend(person)}) == 3
        assert person.home not in (world.sibling(person).home, world.friend(person).home)


# ---- disjointness ----


def words_of(rows: dict, names: set[str]):
    """Every text, and the words of every message, of the named files."""
    for name in sorted(names):
        for row in rows[name]:
            if "text" in row:
                yield row["text"]
            for key in ("conversations", "chosen", "rejected"):
                for entry in row.get(key, []):
                    yield entry["content"]
                    if "reasoning_content" in entry:
                        yield entry["reasoning_content"]


def bare(row: dict) -> str:
    """The last user message without the courtesies around it."""
    text = row["conversations"][-1]["content"]
    for frame in sorted({frame for frames in FRAMES.values() for frame in frames[row["language"]]} - {"{}"}):
        before, after = frame.split("{}")
        if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
            return text[len(before) : len(text) - len(after)]
    return text


def passages(text: str) -> set[str]:
    """Every run of one to four sentences, also without the speaker before a colon."""
    found = set()
    for line in text.split("\n"):
        for start in {line, *(part for colon in (": ", "：") for part in [line.partition(colon)[2]] if part)}:
            sentences = [part for part in re.split(r"(?<=[.?!]) |(?<=[。？！])", start) if part]
            joint = " " if start.isascii() else ""
            for first in range(len(sentences)):
                for last in range(first + 1, min(first + 4, len(sentences)) + 1):
                    found.add(joint.join(sentences[first:last]))
    return found


CONTEXTUAL = ("recall", "persona")  # their question is the whole conversation
TRAINED = {"pretrain.train", "midtrain.train", "sft.train", "dpo.train", "rl.train"}
VALIDATED = {"pretrain.val", "midtrain.val", "sft.val", "dpo.val", "rl.val"}


@pytest.fixture(scope="module")
def trained_passages(rows):
    found = set()
    for text in words_of(rows, TRAINED | VALIDATED):
        found |= passages(text)
    return found


def test_no_test_question_is_asked_anywhere_else(rows, trained_passages):
    asked = {bare(row) for row in rows["eval.test"] if row["family"] not in CONTEXTUAL}
    assert len(asked) > 3000 and not asked & trained_passages
    seen = {json.dumps(row["conversations"], ensure_ascii=False) for row in rows["eval.val"]}
    assert not seen & {json.dumps(row["conversations"], ensure_ascii=False) for row in rows["eval.test"]}
    assert not asked & {bare(row) for row in rows["eval.val"]}


def test_no_validation_question_is_trained_on(rows):
    trained = set()
    for text in words_of(rows, TRAINED):
        trained |= passages(text)
    asked = {bare(row) for row in rows["eval.val"] if row["family"] not in CONTEXTUAL}
    assert not asked & trained


def test_no_conversation_with_context_is_trained_on(rows):
    prefixes = set()
    for name in sorted(TRAINED | VALIDATED):
        for row in rows[name]:
            for key in ("conversations", "chosen"):
                told = row.get(key, [])
                prefixes |= {json.dumps(told[:end], ensure_ascii=False) for end in range(1, len(told) + 1)}
    for row in rows["eval.test"]:
        assert json.dumps(row["conversations"], ensure_ascii=False) not in prefixes
    recalled = [row for row in rows["eval.test"] if row["family"] == "recall"]
    held_out = {(row["conversations"][0]["content"], bare(row)) for row in recalled}
    told = {(row["conversations"][0]["content"], row["conversations"][-2]["content"]) for row in rows["sft.train"]}
    assert not held_out & told


def test_no_test_operands_numbers_or_lists_occur_in_training(rows):
    pairs, triples, lists = set(), set(), set()
    names = {name: word for word in WORDS for name in (word.en, word.zh)}
    longest_first = sorted(names, key=len, reverse=True)
    known = re.compile("|".join(rf"\b{name}\b" if name.isascii() else name for name in longest_first))
    for row in rows["eval.test"]:
        text = bare(row)
        if row["family"] in ("compare", "addition", "subtraction", "calculator"):
            pairs.add(frozenset(re.findall(r"\d+", text)))
        elif row["family"] == "sort":
            triples.add(frozenset(re.findall(r"\d+", text)))
        elif row["family"] in ("count", "position", "odd_one"):
            lists.add(frozenset(names[word] for word in known.findall(text)))
    visitors = re.compile("|".join(name for pair in VISITORS for name in pair))
    assert len(pairs) > 500 and len(triples) > 150 and len(lists) > 500 and min(map(len, lists)) > 1
    for text in words_of(rows, TRAINED):
        for sentence in re.split(r"\n|(?<=[.?!;]) |(?<=[。？！；])", text):
            told = re.sub(r"= ?\d+", "", sentence)
            found = frozenset(re.findall(r"(?<!\d:)(?<!\d)\d+(?![\d:])", told))
            operands = re.findall(r"(\d+) ?[-+*] ?(\d+)", sentence)
            assert found not in pairs and (operands or found not in triples), sentence
            assert not {frozenset(both) for both in operands} & pairs, sentence
            if re.search(", |、", sentence) and not visitors.search(sentence):  # words among names are no word list
                assert frozenset(names[word] for word in known.findall(sentence.lower())) not in lists, sentence


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_draws_stay_in_their_split(world, split):
    for language in ("en", "zh"):
        draw = Draw(world, language, split, random.Random(7))
        for family, ask in [*FAMILIES.items(), *((ask.__name__, ask) for ask in MULTI_STEP)]:
            for _ in range(20):
                question = ask(draw)
                assert question.family == family
                assert question.keys and {split_of(key) for key in question.keys} == {split}


def test_texts_of_validation_files_are_not_trained_on(rows):
    trained = set(words_of(rows, {"pretrain.train", "midtrain.train"}))
    held_out = [row["text"] for name in ("pretrain.val", "midtrain.val") for row in rows[name] if "text" in row]
    repeated = sum(text in trained for text in held_out)
    assert repeated <= 0.06 * len(held_out)  # a few short pages (days of the week, one town's facts) must coincide


# ---- language ----


def test_chinese_is_set_like_chinese(rows):
    wrong = re.compile(rf"[{HAN}] +[{HAN}]|[{HAN}][,.?!;:]|[,.?!;:] ?[{HAN}]|  ")
    allowed = re.compile(rf"[a-z]+(?: is |: )[{HAN}]+(?: in Chinese)?\.?|is [{HAN}]+\.")
    for text in words_of(rows, set(NAMES) - {"eval.val", "eval.test"}):
        if not re.search(f"[{HAN}]", text):
            assert "  " not in text, text
            continue
        for line in text.split("\n"):
            if re.match("[A-Z]", line):  # an English line that teaches a Chinese word
                continue
            assert not wrong.search(allowed.sub("", line)), line


def test_english_uses_right_articles_and_no_stray_chinese(rows):
    for text in words_of(rows, {"pretrain.train", "midtrain.train", "sft.train"}):
        assert not re.search(r"\b[Aa] [aeio]\w|\b[Aa]n [^aeiou]\w", text), text
        assert not re.search(r" [,.?!;]|\{|\}", text) or '{"' in text, text
