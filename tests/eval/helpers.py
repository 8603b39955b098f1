"""What several tests of evaluation write: rows, tasks of lm-evaluation-harness on them, and records of runs."""

import json

CHOICE_FIELDS = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


def write_rows(path, rows):
    """A jsonl file; returns its path."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_task(folder, name, rows, **fields):
    """A task of the harness with its rows, prompts in their `prompt`; returns the path of the rows."""
    folder.mkdir(exist_ok=True)
    data = write_rows(folder / f"{name}.jsonl", rows)
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task | fields))  # JSON is YAML
    return data


SUMS = [{"prompt": f"{n} + 1 =", "choices": [str(n + 1), "no"], "answer": 0} for n in range(6)]

SCORES = {
    "questions": 8, "right": 6, "turns": 9, "turns_ended": 8, "turn_ending_rate": 8 / 9, "seconds": 1.0,
    "tools": {"total": 2, "well_formed": 2, "right_name": 2, "right_arguments": 1, "right_final_answer": 1},
    "families": [
        {"family": family, "language": language, "right": right, "total": 2, "ended": 2, "constant_right": 1,
         "free_arithmetic": family == "addition", "accuracy": right / 2, "low": 0.1, "high": 0.9, "constant": 0.5}
        for family, language, right in
        (("addition", "en", 0), ("home", "en", 2), ("home", "zh", 2), ("lookup", "en", 2))
    ],
}  # fmt: skip


def make_run(folder, stage, tokens=4000, data_path=None, scores=SCORES, fingerprint="same"):
    """The folder of a finished run with made-up figures, evaluated unless there are no `scores`."""
    folder.mkdir(parents=True)
    sources = {"pretrain": ["text"], "mid_train": ["text", "chat"]}.get(stage, ["chat"])
    lines = []
    for step in range(0, 5):
        evaluation = {f"validation_bpb_{source}": 2.0 / (step + 1) for source in sources}
        lines.append({"step": step, "tokens": step * tokens // 4, **evaluation})
        if step:
            lines.append({"step": step, "tokens": step * tokens // 4, "loss": 8.0 / step, "learning_rate": 1e-3})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"rows_read": 1900, "bad_rows": 3, "skipped": {"too long": 2}, "documents": 1234,
            "conversations": 0, "tokens": tokens, "supervised_tokens": tokens // 2, "fill_rate": 0.987,
            "fingerprint": "f" * 64}  # fmt: skip
    run = {
        "stage": stage, "command": f"train_{stage}.py --epochs 1", "finished": "2026-01-01 10:00:00",
        "settings": {"data": {"data_path": data_path, "val_path": None, "max_seq_len": 256}},
        "model": {"hidden_size": 256}, "parameters": {"total": 5_000_000, "active": 5_000_000},
        "data": {"train": data, **{source: data for source in sources}},
        "progress": {"step": 4, "tokens": tokens, "seconds": 65.0}, "tokens_per_second": tokens / 65,
        "precision": "plain", "environment": {"torch": "2.13.0", "device": "cpu", "threads": 2, "ranks": 1},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    if scores:
        sample = {"id": "home-1", "family": "home", "language": "en", "prompt": "Where | is\nMira?",
                  "expected": "Here.", "reply": f"*{stage}*", "right": stage == "full_sft", "ended": True}  # fmt: skip
        languages = {"english": {"bits_per_byte": 0.7}, "chinese": {"bits_per_byte": 0.81}}
        losses = {
            "text": {"bits_per_byte": 0.777, "languages": languages},
            "chat": {"bits_per_byte": 0.888, "languages": {"english": {"bits_per_byte": 0.888}}},
        }
        evaluation = {
            "losses": losses,
            "scores": scores,
            "samples": [sample],
            "questions": {"fingerprint": fingerprint},
        }
        (folder / "eval.json").write_text(json.dumps(evaluation))
    return folder
