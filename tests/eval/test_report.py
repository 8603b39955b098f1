"""Records read back, pictures that are pictures, and a page that says what the runs did."""

import json

import pytest
from matplotlib.image import imread

from eval.curves import format_tokens, merge_languages, smooth
from eval.markdown import cell, duration, table
from eval.page import build_page
from eval.records import chain_records, find_records
from eval.report import ReportArguments, comparable_scores, conditions, evaluate_records, write_report
from tests.eval.helpers import make_run, write_rows


@pytest.fixture
def out(tmp_path):
    for stage in ("full_sft", "pretrain", "mid_train"):
        make_run(tmp_path / "out" / f"{stage}_256", stage)
    return tmp_path / "out"


def test_runs_come_in_the_order_of_their_stages_on_one_axis_of_tokens(out):
    records = find_records(out)
    assert [record.name for record in records] == ["pretrain_256", "mid_train_256", "full_sft_256"]
    assert [record.first_token for record in records] == [0, 4000, 8000]
    assert records[1].validation_points("chat")[0] == (4000, 2.0)
    assert records[2].training_points[-1] == (12000, 2.0)
    assert records[1].validation_sources == ["text", "chat"]


def test_models_of_another_shape_have_an_axis_of_their_own_and_repeats_stand_side_by_side(out):
    make_run(out / "pretrain_512_moe", "pretrain", tokens=9000)
    make_run(out / "full_sft_512_moe", "full_sft")
    make_run(out / "second_256", "pretrain", tokens=6000)
    first = {record.name: record.first_token for record in find_records(out)}
    assert first["pretrain_512_moe"] == 0 and first["full_sft_512_moe"] == 9000
    assert first["second_256"] == 0 and first["mid_train_256"] == 6000
    chains = {record.name: record.chain for record in find_records(out)}
    assert chains["full_sft_512_moe"] == "512_moe" and chains["second_256"] == "256"


def test_named_runs_come_as_named(out):
    assert [record.name for record in find_records(out, ["full_sft_256", "pretrain_256"])] == [
        "full_sft_256",
        "pretrain_256",
    ]
    assert find_records(out, [str(out / "pretrain_256")])[0].name == "pretrain_256"
    assert len(find_records(out, ["pretrain_256", str(out / "pretrain_256")])) == 1, "named twice"


def test_errors_say_what_is_missing_and_what_to_do(out, tmp_path):
    with pytest.raises(ValueError, match="no finished run; make one with: python trainer/train_pretrain.py"):
        find_records(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="--runs nothing: no such run in .*full_sft_256, mid_train_256, pretrain_256"):
        find_records(out, ["nothing"])
    (out / "pretrain_256" / "run.json").write_text("{")
    with pytest.raises(ValueError, match="pretrain_256: the record of this run cannot be read"):
        find_records(out)
    (out / "pretrain_256" / "run.json").unlink()
    with pytest.raises(ValueError, match="pretrain_256: not a finished run, run.json is missing"):
        find_records(out, ["pretrain_256"])


def test_the_page_has_the_totals_first_and_everything_after(out):
    page = write_report(find_records(out), out).read_text(encoding="utf-8")
    start = page.split("## Example answers")[0]
    assert "5.0 million parameters, trained in 3 stages on 12k tokens in **3 min 15 s** on 2 CPU threads" in start
    assert "**100.0 %** of 6 held-out questions correctly (with those that need" in start and "75.0 % of 8)" in start
    assert "ends 88.9 % of its turns" in start
    assert "right call for 50.0 % of 2 questions" in start
    assert "| pretrain_256 | 1,234 | 0 | 4k | 4 | 1 min 05 s | 62 | 2.000 → 0.400 | 0.888 | 75.0 % |" in page
    assert "| full_sft_256 | 1,234 | 0 | 4k | 4 | 1 min 05 s | 62 | 0.777 → 0.777 | 2.000 → 0.400 | 75.0 % |" in page
    assert "| addition \\* | 2 | 50 | 0 (0–66) | 0 (0–66) | 0 (0–66) |" in page
    assert "### Chinese" in page and "| home | 2 | 50 | 100 (34–100) |" in page
    assert "| full_sft_256 | 100.0 % | 100.0 % | 50.0 % | 50.0 % | 88.9 % |" in page
    assert (
        "| home | Where \\| is ⏎ Mira? | Here. | ✗ \\*pretrain\\* | ✗ \\*mid\\_train\\* | ✓ \\*full\\_sft\\* |" in page
    )
    assert "embedded corpus | 1,900 | 5 | 4k | 2k | 98.7 % | `ffffffffffff` |" in page
    assert "train_mid_train.py --epochs 1" in page and "2.13.0" in page
    for line in page.splitlines():
        if line.startswith("|"):
            assert line.endswith("|") and line.replace("\\|", "").count("|") >= 3
    tables = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    assert len(tables) == 8
    assert "| stage | text, english | text, chinese |" in page and "| mid_train_256 | 0.700 | 0.810 |" in page
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings[:3] == ["## Example answers", "## What each stage did", "## Scores by question family"]
    assert "**full_sft** learns to answer" in page
    for rows in tables:
        assert len({row.replace("\\|", "").count("|") for row in rows}) == 1, rows[0]


def test_the_pictures_are_there_and_hold_colours(out):
    page = write_report(find_records(out), out).read_text(encoding="utf-8")
    for name in ("report_curves.png", "report_scores.png"):
        assert f"({name})" in page
        pixels = imread(out / name)
        assert pixels.shape[1] == 1440
        coloured = (pixels[..., :3].max(axis=2) - pixels[..., :3].min(axis=2)) > 0.3
        assert coloured.sum() > 2000, f"{name} has no curves"


def test_without_scores_the_page_leaves_them_out(tmp_path):
    make_run(tmp_path / "pretrain_256", "pretrain", scores=None)
    page = write_report(find_records(tmp_path), tmp_path).read_text(encoding="utf-8")
    assert "report_curves.png" in page and "right answers" not in page and "Scores" not in page
    assert not (tmp_path / "report_scores.png").exists()


def test_runs_scored_on_other_questions_are_not_compared(out):
    make_run(out / "other_256", "other", fingerprint="different")
    records = find_records(out)
    assert [record.name for record in comparable_scores(records)] == ["other_256"]
    assert len(comparable_scores(records[:3])) == 3
    page = write_report(records, out).read_text(encoding="utf-8")
    assert page.count("| other questions |") == 3 and "`--evaluate all` asks all the same ones" in page


def test_siblings_are_no_stages_of_the_last_run_and_other_models_are_not_compared_with_it(out):
    make_run(out / "second_256", "pretrain", tokens=4000)
    make_run(out / "pretrain_512", "pretrain")
    make_run(out / "mine_256", "full_sft")
    names = ["pretrain_256", "second_256", "full_sft_256", "pretrain_512", "mine_256"]
    page = write_report(find_records(out, names), out).read_text(encoding="utf-8")
    assert "trained in 2 stages on 8k tokens" in page
    assert "→ pretrain_512" not in page and "→ mine_256" not in page and "pretrain_256 → second_256" not in page


def test_evaluations_on_other_data_or_with_shorter_replies_are_not_mixed(out):
    records = find_records(out)
    questions = {"fingerprint": records[-1].evaluation["questions"]["fingerprint"]}
    losses = {"text": {"bits_per_byte": 77.125, "languages": {}}}
    records[1].evaluation |= {"questions": questions, "max_new_tokens": 2, "data": ["mine.jsonl"], "losses": losses}
    assert [record.name for record in comparable_scores(records)] == ["pretrain_256", "full_sft_256"]
    assert conditions(records[1]) != conditions(records[2])
    records[1].metrics = [line for line in records[1].metrics if "validation_bpb_text" not in line]
    page = write_report(records, out).read_text(encoding="utf-8")
    assert "77.125" not in page and page.count("| other questions |") == 1


def test_only_what_is_missing_is_evaluated_and_a_users_own_data_is_left_alone(out, monkeypatch, tmp_path):
    questions = tmp_path / "eval.test.jsonl"
    questions.write_text(json.dumps({"conversations": [{"role": "user", "content": "?"}], "answers": ["x"]}) + "\n")
    monkeypatch.setattr("eval.report.ensure_builtin_corpus", lambda folder: {"eval.test": questions})
    asked = []
    monkeypatch.setattr("eval.report.evaluate_record", lambda record, questions, arguments: asked.append(record.name))
    make_run(out / "own_256", "own", data_path=["mine.jsonl"], scores=None)
    records = find_records(out)
    records[0].evaluation["questions"]["fingerprint"] = None
    evaluate_records(records, ReportArguments())
    assert asked == ["pretrain_256", "mid_train_256", "full_sft_256"], "scored on other questions counts as missing"
    asked.clear()
    evaluate_records(records, ReportArguments(evaluate="none"))
    assert asked == []
    evaluate_records(records, ReportArguments(evaluate="all"))
    assert asked[-1] == "own_256"


def test_small_helpers():
    assert [format_tokens(count) for count in (0, 999, 1500, 2_000_000, 3.25e9)] == ["0", "999", "1.5k", "2M", "3.25B"]
    assert [duration(seconds) for seconds in (5.4, 200, 7500)] == ["5 s", "3 min 20 s", "2 h 05 min"]
    assert smooth([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert smooth([0.0, 1.0], keep=0.5) == pytest.approx([0.0, 2 / 3])
    assert cell("a|b\n\n<c>  `d`") == "a\\|b ⏎ \\<c\\>  \\`d\\`" and len(cell("x" * 500, 20)) == 20
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


def test_languages_are_merged_by_counts(out):
    merged = merge_languages(find_records(out)[0])
    assert merged["home"] == {"right": 4, "total": 4, "constant_right": 2, "free_arithmetic": False}
    assert merged["addition"]["free_arithmetic"]


def test_a_page_of_an_empty_evaluation_still_builds(tmp_path):
    folder = make_run(tmp_path / "pretrain_256", "pretrain", scores=None)
    (folder / "metrics.jsonl").write_text("")
    page = build_page(chain_records(find_records(tmp_path)), {})
    assert page.startswith("# How the training went") and "| pretrain_256 |" in page


def test_a_run_stands_behind_those_whose_weights_it_went_on_from(tmp_path):
    starts = {
        "pretrain_256": None,
        "mid_train_256": "/elsewhere/out/pretrain_256",
        "full_sft_256": "checkpoints/mid_train_256/best.pth",
        "distillation_256": "out/mid_train_256",
        "dpo_256": "out/full_sft_256",
        "agent_256": "out/grpo_256",
        "again_256": "out/again_256",
        "ppo_256": "out/lora_256",
        "lora_256": "out/ppo_256",
    }
    for name, start in starts.items():
        path = make_run(tmp_path / name, name.removesuffix("_256")) / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"started_from": start}))
    earlier = {record.name: [other.name for other in record.earlier] for record in find_records(tmp_path)}
    assert earlier["dpo_256"] == ["pretrain_256", "mid_train_256", "full_sft_256"]
    assert earlier["distillation_256"] == ["pretrain_256", "mid_train_256"]
    assert not earlier["pretrain_256"] and not earlier["agent_256"] and not earlier["again_256"]
    assert earlier["ppo_256"] == ["lora_256"] and earlier["lora_256"] == ["ppo_256"], "trained in a circle"
    some = find_records(tmp_path, ["pretrain_256", "full_sft_256", "dpo_256"])
    assert [one.name for one in some[-1].earlier] == ["pretrain_256", "full_sft_256"], "past one that is not asked for"


def test_runs_of_one_name_are_told_apart_by_their_folders_and_old_ones_by_their_names(tmp_path):
    for side in ("a", "b"):
        for name, start in (("pretrain_256", None), ("full_sft_256", "/gone/out/pretrain_256")):
            path = make_run(tmp_path / side / name, name.removesuffix("_256")) / "run.json"
            if side == "b" and start:
                start = str(tmp_path / "a" / "pretrain_256")
            path.write_text(json.dumps(json.loads(path.read_text()) | {"started_from": start}))
    paths = [str(tmp_path / side / name) for side in "ba" for name in ("pretrain_256", "full_sft_256")]
    records = find_records(tmp_path, paths)
    assert [one.earlier[0].folder.parent.name for one in records if one.earlier] == ["a", "a"]
    old = make_run(tmp_path / "c" / "pretrain_256", "pretrain")
    make_run(tmp_path / "c" / "full_sft_256", "full_sft")
    path = make_run(tmp_path / "c" / "dpo_256", "dpo") / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started_from": str(old.parent / "full_sft_256")}))
    assert [one.name for one in find_records(old.parent)[-1].earlier] == ["pretrain_256", "full_sft_256"]


def test_changes_and_mistakes_come_from_the_replies(out):
    for stage, rights in (("pretrain", [1] * 20), ("mid_train", [1] * 8 + [0] * 12)):
        rows = [
            {"id": f"q{number}", "family": "home", "language": "en", "prompt": f"Where is {number}?",
             "expected": "Here.", "reply": "*There*", "right": bool(right)}
            for number, right in enumerate(rights)
        ]  # fmt: skip
        write_rows(out / f"{stage}_256" / "eval_replies.jsonl", rows)
    page = build_page(find_records(out, ["pretrain_256", "mid_train_256"]), {})
    assert "| pretrain_256 → mid_train_256 | 20 | 0 | 12 |" in page
    assert "Fell from pretrain_256 → mid_train_256: home (en) 100 → 40 %." in page
    assert "## What mid_train_256 gets wrong" in page and "| home | Where is 14? | Here. | \\*There\\* |" in page
    assert "chat.py --model_path" in page.split("## Try next")[1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", "[]"),
        ("run.json", '{"progress": 5}'),
        ("run.json", '{"data": {"train": []}}'),
        ("metrics.jsonl", "5\n"),
        ("metrics.jsonl", '{"step": 1, "tokens": "x", "loss": 2}\n'),
        ("eval.json", '{"scores": []}'),
        ("eval.json", '{"scores": {"families": [{"family": "a"}]}}'),
        ("eval.json", '{"scores": {"families": [{"family": "a", "language": "b", "right": 0, "total": 0}]}}'),
    ],
)
def test_damaged_records_are_named_by_their_folder(out, name, text):
    (out / "pretrain_256" / name).write_text(text)
    with pytest.raises(ValueError, match="pretrain_256: the record of this run is damaged"):
        find_records(out)
