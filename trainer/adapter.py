"""What training an adapter does otherwise: it adapts a named model folder, and leaves an adapter behind."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from model.model_minimind import MiniMindForCausalLM
from trainer import results
from trainer.config import Settings
from trainer.lora import add_adapter, merged, save_adapter
from trainer.run import Run
from trainer.stage import Stage
from trainer.weights import ADAPTER_CONFIG, resolve_from_weight


def base_folder(settings: Settings, candidates: tuple[str, ...]) -> Path:
    """The folder of the model that the adapter belongs to.

    Args:
        settings: of the run.
        candidates: what `--from_weight auto` looks for.

    Raises:
        ValueError: `--from_weight` names no model folder, which an adapter needs to name.
    """
    base = resolve_from_weight(settings.model, settings.run.save_dir, candidates)
    if base is None:
        raise ValueError("--from_weight none: an adapter needs a trained model; give a stage's name or a model folder")
    if base.is_file():
        raise ValueError(
            f"--from_weight {base}: an adapter belongs to a model folder; make one with: "
            f"python scripts/convert_model.py --from_weight {base} --to qwen3"
        )
    if (base / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"--from_weight {base}: is itself an adapter; take a model, such as the one that --merge 1 leaves"
        )
    return base


def merged_folder(settings: Settings, model: MiniMindForCausalLM) -> Path:
    """Where the base with the adapter merged in goes."""
    return results.result_folder(settings.run.save_dir, f"{settings.run.save_weight}_merged", model.config)


def adapting(stage: Stage) -> Stage:
    """A stage as one that trains an adapter beside the weights that it starts from, and leaves it behind."""

    def adapt_all(model: MiniMindForCausalLM, settings: Settings) -> list[str]:
        notes = adapt(model, settings, stage.start_from)
        return notes + (stage.adapt(model, settings) if stage.adapt is not None else [])

    save = functools.partial(save_result, candidates=stage.start_from)
    return dataclasses.replace(stage, adapt=adapt_all, save=save, marker=ADAPTER_CONFIG)


def adapt(model: MiniMindForCausalLM, settings: Settings, candidates: tuple[str, ...]) -> list[str]:
    """Freeze the model and put the adapter on; gives notes for the user."""
    base_folder(settings, candidates)
    if settings.optimization.parallel == "fsdp":
        raise ValueError("--parallel fsdp: an adapter is small and its base is frozen; use --parallel ddp")
    if settings.stage.merge:
        results.check_result_folder(merged_folder(settings, model), model.config)
    return add_adapter(model, settings.stage)


def save_result(
    run: Run,
    model: MiniMindForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    record: dict[str, Any],
    candidates: tuple[str, ...],
) -> None:
    """Leave the adapter behind in PEFT's format, and with --merge 1 the merged model beside it."""
    settings, metrics_path = run.settings, run.checkpoints.folder / "metrics.jsonl"
    base = base_folder(settings, candidates)
    card = results.model_card(
        record, f"An adapter (LoRA) for `{base.name}`; it opens with `PeftModel.from_pretrained`."
    )
    with results.writing_result(folder, record, card, metrics_path) as temporary:
        save_adapter(model, tokenizer, temporary, base, settings.stage)
    if settings.stage.merge:
        whole = merged_folder(settings, model)
        with results.writing_result(whole, record, results.model_card(record), metrics_path) as temporary:
            results.save_model(merged(model), tokenizer, temporary, settings.run.save_dtype)
        run.tracker.say(f"saved {whole}: the base with the adapter merged in")
