"""Fine-tune an adapter (LoRA) on conversations; the base model stays as it is."""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from model.model_minimind import MiniMindForCausalLM
from trainer import results
from trainer.config import Settings, user_errors
from trainer.data import build_sft_data
from trainer.lora import LoraArguments, add_adapter, merged, save_adapter
from trainer.losses import language_model_loss
from trainer.run import Run
from trainer.stage import Stage, run_stage
from trainer.weights import ADAPTER_CONFIG, resolve_from_weight

START_FROM = ("full_sft", "mid_train", "pretrain")


def base_folder(settings: Settings) -> Path:
    """The folder of the model that the adapter belongs to.

    Raises:
        ValueError: `--from_weight` names no model folder, which an adapter needs to name.
    """
    base = resolve_from_weight(settings.model, settings.run.save_dir, START_FROM)
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


def adapt(model: MiniMindForCausalLM, settings: Settings) -> list[str]:
    """Freeze the model and put the adapter on; gives notes for the user."""
    base_folder(settings)
    if settings.optimization.parallel == "fsdp":
        raise ValueError("--parallel fsdp: an adapter is small and its base is frozen; use --parallel ddp")
    if settings.stage.merge:
        results.check_result_folder(merged_folder(settings, model), model.config)
    return add_adapter(model, settings.stage)


def save(
    run: Run, model: MiniMindForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, record: dict[str, Any]
) -> None:
    """Leave the adapter behind in PEFT's format, and with --merge 1 the merged model beside it."""
    settings, metrics_path = run.settings, run.checkpoints.folder / "metrics.jsonl"
    base = base_folder(settings)
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


STAGE = Stage(
    name="lora",
    description="Fine-tune an adapter on conversations; --from_weight auto takes the newest finished model to adapt.",
    build_data=build_sft_data,
    loss=language_model_loss,
    defaults={
        "from_weight": "auto",
        "max_seq_len": 256,
        "batch_size": 16,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "weight_decay": 0.0,
        "min_lr_ratio": 0.0,
    },
    start_from=START_FROM,
    sample_prompts=([{"role": "user", "content": "Who are you?"}], [{"role": "user", "content": "你是谁？"}]),
    flags=LoraArguments,
    adapt=adapt,
    save=save,
    marker=ADAPTER_CONFIG,
)


def main() -> None:
    """Entry point."""
    run_stage(STAGE)


if __name__ == "__main__":
    with user_errors():
        main()
