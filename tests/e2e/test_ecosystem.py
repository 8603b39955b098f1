"""Other people's tools on a stage's folder as it is: TRL's trainers, PEFT, lm-eval."""

import json
import math
import os
import subprocess
import sys

import pytest
from datasets import Dataset

from tests.eval.helpers import CHOICE_FIELDS, SUMS, write_task
from tests.model.helpers import tiny_model
from trainer.results import save_model

SHAPES = {"dense": {}, "moe": {"use_moe": True}}
QUIET = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False, "report_to": "none"}
QUIET |= {"save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False, "logging_steps": 1}
QUESTION, ANSWER, WORSE = (
    [{"role": role, "content": text}]
    for role, text in (("user", "What is 1 + 1?"), ("assistant", "It is 2."), ("assistant", "你好"))
)


@pytest.fixture(scope="module", params=list(SHAPES))
def folder(request, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("ecosystem") / "full_sft_32"
    model = tiny_model(vocab_size=len(tokenizer), initializer_range=0.02, **SHAPES[request.param])
    save_model(model, tokenizer, path)
    return path


def losses(trainer):
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found) == 2 and all(math.isfinite(loss) for loss in found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
def test_trl_fine_tunes(folder, tmp_path, adapter):
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"messages": QUESTION + ANSWER}] * 8)
    arguments = SFTConfig(output_dir=str(tmp_path), assistant_only_loss=True, max_length=64, **QUIET)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if adapter else None
    trainer = SFTTrainer(model=str(folder), args=arguments, train_dataset=rows, peft_config=config)
    assert type(trainer.model).__name__.startswith("PeftModel" if adapter else "Qwen3")
    first = losses(trainer)[0]
    assert abs(first - math.log(4657)) < 1.5, "labels are the assistant's tokens of a random model"


@pytest.mark.slow
def test_trl_prefers(folder, tmp_path):
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = Dataset.from_list([{"prompt": QUESTION, "chosen": ANSWER, "rejected": WORSE}] * 8)
    arguments = DPOConfig(output_dir=str(tmp_path), max_length=64, **QUIET)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = DPOTrainer(model=str(folder), args=arguments, train_dataset=rows, processing_class=tokenizer)
    assert abs(losses(trainer)[0] - math.log(2)) < 5e-3, "policy and reference are alike; an MoE adds its balance loss"


@pytest.mark.slow
def test_lm_eval_scores_a_local_task(folder, tmp_path):
    write_task(tmp_path / "tasks", "my_task", SUMS, **CHOICE_FIELDS)
    command = f"-m lm_eval --model hf --model_args pretrained={folder},dtype=float32 --tasks my_task --device cpu"
    command += f" --include_path {tmp_path}/tasks --output_path {tmp_path}/result --batch_size 2"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, *command.split()], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = tmp_path.glob("result/**/results_*.json")
    assert 0 <= json.loads(result.read_text())["results"]["my_task"]["acc,none"] <= 1
