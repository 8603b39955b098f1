"""What several tests of evaluation write: rows, and tasks of lm-evaluation-harness on them."""

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
