"""The whole road by the commands of the README: train, MiniMind's file and back, GGUF, server, client, answer.

Small models, trained here until they know five answers. MINIMIND_MODELS=FOLDER:FOLDER walks finished models too, as
are the quickstart's.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dataset.chat import render_prompt
from model.decoding import Decoder, generate_tokens
from model.model_minimind import load_model
from scripts.serving.engines import Load, running_engine
from tests.conftest import ROOT
from tests.hard_strings import hard_strings
from tests.model.test_gguf_file import LlamaCpp

KNOWN = {
    "Who are you?": "I am a small language model.",
    "你是谁？": "我是一个小语言模型。",
    "What is 2 + 2?": "It is 4.",
    "Where does Mira live?": "Mira lives in Redmill.",
    "米拉住在哪里？": "米拉住在红磨坊镇。",
}
SHAPE = "--from_weight none --hidden_size 128 --num_hidden_layers 2"
TRAINING = "--max_seq_len 64 --batch_size 8 --max_steps 60 --epochs 100 --eval_interval 0 --dtype float32 --init normal"
EXPERTS = "--use_moe 1 --num_experts 4 --num_experts_per_tok 2"
FINISHED = [Path(path) for path in os.environ.get("MINIMIND_MODELS", "").split(":") if path]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("road")]  # so that each model is trained once


def run(words, folder):
    done = subprocess.run([sys.executable, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done.stdout


@pytest.fixture(scope="module", params=["dense", "moe", *FINISHED], ids=lambda param: Path(param).name)
def model_folder(request, tmp_path_factory):
    if isinstance(request.param, Path):
        return request.param
    home = tmp_path_factory.mktemp("road")
    rows = [
        json.dumps({"conversations": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
        for question, answer in KNOWN.items()
    ]
    (home / "chats.jsonl").write_text("\n".join(rows * 40), encoding="utf-8")
    (home / "val.jsonl").write_text(rows[0], encoding="utf-8")
    words = f"{ROOT}/trainer/train_full_sft.py --data_path chats.jsonl --val_path val.jsonl {SHAPE} {TRAINING}"
    words += f" --save_dir out --checkpoint_dir checkpoints --cache_dir cache {EXPERTS * (request.param == 'moe')}"
    run(words.split(), home)
    (folder,) = (home / "out").glob("full_sft_128*")
    return folder


@torch.no_grad()
def test_logits_agree_with_transformers_and_after_minimind_s_file(model_folder, tokenizer, tmp_path):
    ours = load_model(str(model_folder))
    pth, back = tmp_path / f"{model_folder.name}.pth", tmp_path / "back"
    convert = [ROOT / "scripts/convert_model.py", "--from_weight"]
    run([*convert, model_folder, "--to", "minimind", "--save_dtype", "float32", "--output", pth], tmp_path)
    experts = ["--num_experts_per_tok", ours.config.num_experts_per_tok] if ours.config.use_moe else []
    run([*convert, pth, "--to", "qwen3", "--output", back, "--tokenizer_path", model_folder, *experts], tmp_path)
    ids = torch.tensor([tokenizer("米拉住在红磨坊镇。 Mira lives in Redmill, 1 + 2 = 3.\n")["input_ids"] * 3])
    expected = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)(ids).logits
    for model in (ours, load_model(str(back))):
        assert (model(ids).logits - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())


def test_tokens_and_greedy_answers_agree_with_llama_cpp(model_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ours, theirs = (kind(model_folder) for kind in (opened_here, opened_by_transformers))
    path = tmp_path / "model.gguf"
    convert = [ROOT / "scripts/convert_model.py", "--from_weight", model_folder, "--to", "gguf"]
    run([*convert, "--quantize", "f32", "--output", path], tmp_path)
    with running_engine("llama.cpp", path, "model", Load(1, 512, 1, exact=True)) as engine:
        llama_cpp = LlamaCpp(engine)
        for text in hard_strings():
            normal = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
            cut = llama_cpp.post("/tokenize", content=normal, add_special=False, parse_special=True)["tokens"]
            assert cut == tokenizer(text)["input_ids"], repr(text)
        for question in KNOWN:
            prompt = render_prompt([{"role": "user", "content": question}], tokenizer)
            answer, _ = llama_cpp.greedy(prompt, 24)
            assert ours(prompt, len(answer)) == theirs(prompt, len(answer)) == answer, question


def opened_here(folder):
    decoder = Decoder(load_model(str(folder)), torch.float32)
    return lambda prompt, count: list(generate_tokens(decoder, [prompt], count, [])[0].ids)


def opened_by_transformers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answer(prompt, count):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
        return out[0, len(prompt) :].tolist()

    return answer


def test_the_server_answers_what_was_learned(model_folder, tmp_path):
    words = [ROOT / "scripts/serve_openai_api.py", "--model_path", model_folder, "--port", 0, "--slots", 4]
    words += ["--temperature", 0, "--quantize", "f32"]
    process = subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        url = re.search(r"http://\S+/v1", process.stdout.readline())[0]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        for question, answer in KNOWN.items():
            asked = [{"role": "user", "content": question}]
            said = client.chat.completions.create(model=model_folder.name, messages=asked).choices[0]
            assert said.finish_reason == "stop", said
            if model_folder not in FINISHED:
                assert said.message.content == answer
    finally:
        process.terminate()
        process.wait(20)
