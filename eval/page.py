"""The report as markdown, from the records of finished runs: totals first, then stage by stage, then details."""

from collections.abc import Sequence
from typing import Any

from eval.changes import changes, mistakes
from eval.curves import format_tokens, merge_languages
from eval.markdown import cell, duration, table
from eval.questions import wilson_interval
from eval.records import RunRecord
from eval.stages import short_path

LANGUAGE_NAMES = {"en": "English", "zh": "Chinese"}
SAMPLE_FAMILIES = 10
EMBEDDED_WORLD = (
    "The questions are about an invented world: its facts were read in training, these wordings of the questions were "
    "not; numbers, lists and stories are new."
)
STAGE_MEANINGS = {
    "pretrain": "reads documents and learns to guess each next token: spelling, grammar, facts",
    "mid_train": "goes on with better documents and with first conversations, so that it knows what a turn looks like",
    "full_sft": "learns to answer: of each conversation only the assistant's words count",
    "distillation": "learns a teacher's probability of every next token, not only the token that came",
    "dpo": "learns which of two answers is better",
    "grpo": "answers by itself, and learns from rewards for what it says",
    "ppo": "answers by itself, and learns from rewards and from a critic that foresees them",
    "agent": "uses tools by itself, and learns from rewards for where that leads",
    "lora": "learns a small adapter beside weights that stay as they are",
}


def build_page(records: Sequence[RunRecord], pictures: dict[str, str]) -> str:
    """The whole report.

    Args:
        records: the runs, in order; see `eval.records.find_records`.
        pictures: file names of "curves", "rewards", "scores" and "experts", as far as they were drawn.
    """
    scored = [record for record in records if record.family_scores]
    sections = [_totals(records), _samples(scored) if scored else "", _stages(records)]
    if "curves" in pictures:
        sections.append(
            f"![Validation bits per byte and training loss over all stages]({pictures['curves']})\n\n"
            "Above: bits per byte on held-out text and chats. Below: the training loss over the tokens that each stage "
            "learns from, so it jumps where the data changes."
        )
    if "rewards" in pictures:
        sections.append(
            f"## Rewards and preferences\n\n![Rewards and pairs told apart, by step]({pictures['rewards']})\n\n"
            "Of stages whose loss says little, what they aim at: the mean reward of what the model draws itself, with "
            "chance in it, and of its likeliest answers to held-out prompts; or in how many pairs the chosen side is "
            "likelier. Their tokens are those learned from, and their tokens/s have the time to draw in them."
        )
    sections.append(_languages(records))
    if scored:
        sections += [_scores(scored, pictures), changes(scored), _tools(scored), mistakes(scored[-1])]
    if "experts" in pictures:
        sections.append(
            f"## Experts\n\n![Load of each expert]({pictures['experts']})\n\n"
            "How many tokens each expert of each layer gets, as a multiple of an even share. Red ones are busy, blue "
            "ones idle; the balance loss keeps them near 1."
        )
    sections += [_data(records), _environment(records), _commands(records), _next_steps(records[-1])]
    return "\n\n".join(["# How the training went", *(section for section in sections if section)]) + "\n"


def _percent(right: int, total: int) -> str:
    return f"{right / total:.1%}".replace("%", " %") if total else "-"


def _with_interval(score: dict[str, Any]) -> str:
    interval = wilson_interval(score["right"], score["total"])
    return f"{100 * score['right'] / score['total']:.0f} ({100 * interval.low:.0f}–{100 * interval.high:.0f})"


def _totals(records: Sequence[RunRecord]) -> str:
    """What a newcomer wants to know, in a few lines."""
    last = records[-1]
    chain = [*last.earlier, last]
    parameters = last.run.get("parameters", {})
    total, active = parameters.get("total", 0), parameters.get("active", 0)
    size = f"{total / 1e6:.1f} million parameters" + (
        f" ({active / 1e6:.1f} million active)" if active != total else ""
    )
    lines = [
        f"- **{last.name}**: {size}, trained in {len(chain)} stage{'s' if len(chain) > 1 else ''} on "
        f"{format_tokens(sum(record.tokens for record in chain))} tokens in "
        f"**{duration(sum(record.seconds for record in chain))}** on {_device(last)}."
    ]
    scores = (last.evaluation or {}).get("scores")
    if scores:
        families = merge_languages(last).values()
        plain = [score for score in families if not score["free_arithmetic"]]
        right, asked = sum(score["right"] for score in plain), sum(score["total"] for score in plain)
        everything = f"{_percent(scores['right'], scores['questions'])} of {scores['questions']:,}"
        apart = f" (with those that need arithmetic without a tool: {everything})"
        lines.append(
            f"- It answers **{_percent(right, asked)}** of {asked:,} held-out questions correctly"
            + apart * (len(plain) < len(families))
            + f", and ends {_percent(scores['turns_ended'], scores['turns'])} of its turns itself."
        )
        tools = scores["tools"]
        if tools["total"]:
            lines.append(
                f"- It makes the right call for {_percent(tools['right_arguments'], tools['total'])} of "
                f"{tools['total']:,} questions that need a tool."
            )
    return "\n".join(lines)


def _device(record: RunRecord) -> str:
    environment = record.run.get("environment", {})
    device = str(environment.get("device", "an unknown device"))
    if device == "cpu":
        threads = environment.get("threads", "?")
        device = f"{threads} CPU thread{'' if threads == 1 else 's'}"
    ranks = environment.get("ranks", 1)
    return device if ranks == 1 else f"{ranks} ranks of {device}"


def _stages(records: Sequence[RunRecord]) -> str:
    sources = list(dict.fromkeys(source for record in records for source in record.validation_sources))
    sources.sort(key=lambda source: {"text": 0, "chat": 1}.get(source, 2))
    scored = any(record.family_scores for record in records)
    header = ["stage", "documents", "chats", "tokens", "steps", "time", "tokens/s"]
    header += [f"bits per byte, {source}" for source in sources] + (["right answers"] if scored else [])
    rows = []
    for record in records:
        data = record.run.get("data", {}).get("train", {})
        row = [
            record.name,
            f"{data.get('documents', 0):,}",
            f"{data.get('conversations', 0):,}",
            format_tokens(record.tokens),
            f"{record.run.get('progress', {}).get('step', 0):,}",
            duration(record.seconds),
            f"{record.run.get('tokens_per_second', 0):,.0f}",
        ]
        row += [_before_after(record, source) for source in sources]
        if scored:
            scores = (record.evaluation or {}).get("scores")
            missing = "other questions" if record.other_questions else "-"
            row.append(_percent(scores["right"], scores["questions"]) if scores else missing)
        rows.append(row)
    stages = dict.fromkeys(record.stage for record in records)
    meanings = [f"- **{stage}** {STAGE_MEANINGS[stage]}." for stage in stages if stage in STAGE_MEANINGS]
    text = ["## What each stage did", *(["\n".join(meanings)] if meanings else []), table(header, rows)]
    if sources:
        text.append(
            "*Bits per byte* is what the model would need to write a byte of text down that it has not seen; a file "
            "takes 8. The lower the better, whatever the tokenizer. Before → after the stage. A stage unlearns what it "
            "no longer reads, so a model that answers may be a poor one for plain text; and looks in the middle of "
            "pretraining cut documents at the ends of rows, which costs a little."
        )
    if any(record.other_questions for record in records):
        text.append(
            "*Other questions*: evaluated on others than the last run; `--evaluate all` asks all the same ones."
        )
    return "\n\n".join(text)


def _before_after(record: RunRecord, source: str) -> str:
    """Bits per byte before and after the stage; where it did not look at that source, by the evaluations of both."""
    points = record.validation_points(source)
    if points:
        return f"{points[0][1]:.3f} → {points[-1][1]:.3f}" if len(points) > 1 else f"{points[0][1]:.3f}"
    value = _evaluated(record, source)
    if value is None:
        return "-"
    earlier = _evaluated(record.earlier[-1], source) if record.earlier else None
    return f"{value:.3f}" if earlier is None else f"{earlier:.3f} → {value:.3f}"


def _evaluated(record: RunRecord, source: str) -> float | None:
    return (record.evaluation or {}).get("losses", {}).get(source, {}).get("bits_per_byte")


def _languages(records: Sequence[RunRecord]) -> str:
    """Bits per byte by language, where the validation text has several."""
    values: list[dict[str, float | None]] = []
    for record in records:
        losses = (record.evaluation or {}).get("losses", {})
        values.append({
            f"{source}, {language}": part.get("bits_per_byte")
            for source, sums in losses.items()
            for language, part in sums.get("languages", {}).items() if len(sums["languages"]) > 1
        })  # fmt: skip
    columns = list(dict.fromkeys(column for of_record in values for column in of_record))
    if not columns:
        return ""
    rows = [
        [record.name, *("-" if (value := of_record.get(column)) is None else f"{value:.3f}" for column in columns)]
        for record, of_record in zip(records, values, strict=True)
        if of_record
    ]
    return "### Bits per byte by language, after each stage\n\n" + table(["stage", *columns], rows)


def _scores(records: Sequence[RunRecord], pictures: dict[str, str]) -> str:
    scores = [record.family_scores for record in records]
    languages = sorted({language for of_record in scores for _, language in of_record})
    text = ["## Scores by question family"]
    if "scores" in pictures:
        text.append(f"![Right answers by question family, for each stage]({pictures['scores']})")
    text.append(
        "Right answers to held-out questions in per cent, greedily decoded, with the 95 % interval (Wilson). "
        "*constant* is what the best single reply to all of a family's questions would get; choosing blindly between "
        "things that a question names gets more. The intervals are about the choice of questions, not about another "
        "training run; some questions differ only in a greeting, so they are a little too narrow."
        + (f" {EMBEDDED_WORLD}" if _is_embedded(records) else "")
    )
    for language in languages:
        families = sorted(
            {family for of_record in scores for family, its_language in of_record if its_language == language}
        )
        rows = []
        for family in families:
            found = [of_record.get((family, language)) for of_record in scores]
            one = next(score for score in found if score)
            rows.append([
                cell(family) + (" \\*" if one["free_arithmetic"] else ""),
                f"{one['total']}",
                f"{100 * one['constant']:.0f}",
                *(_with_interval(score) if score else "-" for score in found),
            ])  # fmt: skip
        title = LANGUAGE_NAMES.get(language, language)
        header = ["family", "questions", "constant", *(record.name for record in records)]
        text.append(f"### {title}\n\n" + table(header, rows))
    if any(score["free_arithmetic"] for of_record in scores for score in of_record.values()):
        text.append("\\* needs arithmetic without a tool")
    return "\n\n".join(text)


def _is_embedded(records: Sequence[RunRecord]) -> bool:
    return all(record.evaluation.get("questions", {}).get("path") == "embedded" for record in records)


def _tools(records: Sequence[RunRecord]) -> str:
    rows = []
    for record in records:
        scores = record.evaluation["scores"]
        tools = scores["tools"]
        steps = ("well_formed", "right_name", "right_arguments", "right_final_answer")
        rows.append(
            [record.name]
            + [_percent(tools[name], tools["total"]) for name in steps]
            + [_percent(scores["turns_ended"], scores["turns"])]
            + [f"{100 * scores['repetition_rate']:.1f} %" if "repetition_rate" in scores else "-"]
        )
    total = records[-1].evaluation["scores"]["tools"]["total"]
    header = [
        "stage",
        "well-formed",
        "right tool",
        "right arguments",
        "right final answer",
        "turns ended",
        "repetition",
    ]
    return (
        "## Tool calls and turns\n\n"
        f"Of {total:,} questions that need a tool; the share of all turns that the model ended itself; "
        "and of sequences of four words in a reply, the share that it had said before.\n\n" + table(header, rows)
    )


def _samples(records: Sequence[RunRecord]) -> str:
    """The same questions answered by each stage, side by side: some families, the languages in turn."""
    by_id = [{sample["id"]: sample for sample in record.evaluation["samples"]} for record in records]
    shared = [sample for identifier, sample in by_id[-1].items() if all(identifier in samples for samples in by_id)]
    families: dict[str, list[dict[str, Any]]] = {}
    for sample in shared:
        families.setdefault(sample["family"], []).append(sample)
    rows = []
    chosen = list(families.values())[:: max(1, len(families) // SAMPLE_FAMILIES)][:SAMPLE_FAMILIES]
    for index, of_family in enumerate(chosen):
        sample = of_family[index % len(of_family)]
        replies = [samples[sample["id"]] for samples in by_id]
        rows.append(
            [cell(sample["family"]), cell(sample["prompt"]), cell(sample["expected"])]
            + [("✓ " if reply["right"] else "✗ ") + cell(reply["reply"], 100) for reply in replies]
        )
    if not rows:
        return ""
    header = ["family", "question", "expected", *(record.name for record in records)]
    opening = (
        "## Example answers\n\nThe same held-out questions after each stage. A model that has only read takes a "
        "question for text to go on with; one that has seen conversations answers. What it thinks is not judged, only "
        "what it says then.\n\n"
    )
    return opening + table(header, rows, left=len(header))


def _data(records: Sequence[RunRecord]) -> str:
    rows = []
    for record in records:
        for name, data in record.run.get("data", {}).items():
            paths = record.data_paths if name == "train" else record.run["settings"]["data"].get("val_path") or []
            paths = paths or list(data.get("passes", {})) or ["embedded corpus"]
            skipped = sum(data.get("skipped", {}).values()) + data.get("bad_rows", 0)
            rows.append([
                record.name,
                name if name == "train" else f"validation: {name}",
                ", ".join(cell(short_path(path), 60) for path in paths),
                f"{data.get('rows_read', 0):,}",
                f"{skipped:,}",
                format_tokens(data.get("tokens", 0)),
                format_tokens(data.get("supervised_tokens", 0)),
                f"{100 * data.get('fill_rate', 0):.1f} %",
                f"`{str(data.get('fingerprint', ''))[:12]}`",
            ])  # fmt: skip
    header = ["stage", "part", "from", "rows", "left out", "tokens", "with a loss", "filled", "fingerprint"]
    return (
        "## Data\n\n*Left out*: rows that could not be used. *With a loss*: tokens that are trained on. *Filled*: the "
        "share of the rows' places that hold a token. The *fingerprint* changes with any row.\n\n"
        + table(header, rows, left=3)
    )


def _environment(records: Sequence[RunRecord]) -> str:
    names = list(dict.fromkeys(name for record in records for name in record.run.get("environment", {})))
    rows = [
        [name, *(cell(str(record.run.get("environment", {}).get(name, "-"))) for record in records)] for name in names
    ]
    rows.append(["precision", *(cell(str(record.run.get("precision", "-"))) for record in records)])
    shape = [", ".join(f"{name} {value}" for name, value in record.run.get("model", {}).items()) for record in records]
    rows.append(["model", *(cell(text, 400) for text in shape)])
    header = ["", *(record.name for record in records)]
    return "## Environment\n\n" + table(header, rows, left=len(header))


def _commands(records: Sequence[RunRecord]) -> str:
    lines = [str(record.run.get("command", "")) for record in records]
    return "## Commands that made it\n\n```\n" + "\n".join(lines) + "\n```"


def _next_steps(last: RunRecord) -> str:
    folder = short_path(last.folder)
    commands = [
        f"python scripts/chat.py --model_path {folder}",
        f"python eval/eval_llm.py --model_path {folder} --questions my_questions.jsonl",
        f"python scripts/serve_openai_api.py --model_path {folder}",
    ]
    return "## Try next\n\n```\n" + "\n".join(commands) + "\n```"
