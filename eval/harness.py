"""lm-evaluation-harness on a model's folder: its own tasks, local YAML files, and our questions as one of its tasks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from dataset.chat import chat_renderer
from dataset.formats import parse_reply
from eval.questions import Question, is_right
from eval.tasks import reply_caps

# What this field quotes, by the harness's names; all without examples in the prompt, as it quotes them.
FIELD_TASKS = (
    *("ceval-valid", "cmmlu", "arc_easy", "arc_challenge", "hellaswag", "piqa", "openbookqa", "social_iqa"),
    *("winogrande", "gsm8k"),
)
EMBEDDED_CHECKS = ("exact", "number")


def task_names(asked: Sequence[str], include_path: str | None) -> tuple[list[str], TaskManager]:
    """The tasks that names, groups and "field" stand for, and the manager that knows them.

    Raises:
        ValueError: unknown names, or no such folder.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"--include_path {include_path}: no such folder of YAML tasks")
    manager = TaskManager(include_path=include_path)
    names = list(dict.fromkeys(name for word in asked for name in (FIELD_TASKS if word == "field" else (word,))))
    if unknown := sorted(name for name in names if name not in manager.all_tasks):
        raise ValueError(
            f"--tasks {' '.join(unknown)}: the harness knows no such task; `lm_eval --tasks list` lists its own, "
            "--include_path FOLDER adds yours, `field` and `embedded` are ours"
        )
    return names, manager


def run_harness(
    folder: Path,
    tasks: Sequence[str | ConfigurableTask],
    manager: TaskManager,
    device: str,
    dtype: str,
    batch_size: int,
    num_fewshot: int | None,
    limit: int | None,
    chat: bool,
    seed: int = 0,
) -> dict[str, Any]:
    """The harness's own results.

    Raises:
        ValueError: a task's data cannot be fetched.
    """
    model = HFLM(pretrained=str(folder), device=device, dtype=dtype, batch_size=batch_size)
    try:
        results = simple_evaluate(
            model,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            apply_chat_template=chat,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except (ConnectionError, OSError) as error:  # what `datasets` raises without its hub
        raise ValueError(
            f"a task's data cannot be fetched: {error}. Without the hub take --tasks embedded, or your own with "
            "--include_path"
        ) from error
    except (KeyError, ValueError) as error:  # such as a task beside its group, or a split that its data have not got
        raise ValueError(f"the harness cannot run --tasks {' '.join(map(str, tasks))}: {error}") from error
    return results


def asked_by_harness(questions: Sequence[Question]) -> list[Question]:
    """Those questions that one reply answers."""
    return [question for question in questions if question.check in EMBEDDED_CHECKS and not question.tools]


def is_right_reply(text: str, row: Mapping[str, Any]) -> bool:
    """The verdict of `eval_llm`: on what a reply says behind its reasoning; a call is no answer."""
    message = parse_reply(text)
    return not message.get("tool_calls") and is_right(message["content"], row["answers"], row["check"])


def embedded_task(questions: Sequence[Question], tokenizer, folder: Path) -> ConfigurableTask:
    """Those questions that one reply answers as a task of the harness, with our rule of what is right.

    Args:
        questions: others than exact and numeric ones without tools are left out.
        tokenizer: of the model, whose chat template makes the prompts.
        folder: the task's rows are written there.
    """
    asked = asked_by_harness(questions)
    chats = chat_renderer(tokenizer).render_many([(question.messages, None) for question in asked], True)
    rows = [
        {"prompt": tokenizer.decode(chat.input_ids), "answers": question.answers, "check": question.check}
        for chat, question in zip(chats, asked, strict=True)
    ]
    path = folder / "embedded.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return ConfigurableTask(
        config={
            "task": "embedded",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path)}},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{answers[0]}}",
            "process_results": lambda row, replies: {"acc": is_right_reply(replies[0], row)},
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            "generation_kwargs": {
                "until": [tokenizer.eos_token],
                "max_gen_toks": max(reply_caps(tokenizer, asked)),
                "do_sample": False,
            },
        }
    )
