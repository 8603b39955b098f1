"""Our decoder against transformers' `generate`: the same weights, cores and prompts, greedily and as rollouts."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from model.config import MiniMindConfig
from model.decoding import Decoder, generate_tokens
from model.model_minimind import MiniMindForCausalLM
from scripts.benchmarking.peers import peer_model
from trainer.rollout import sampler_of

BATCHES = (1, 16, 64)
PROMPT_TOKENS = (24, 40)
CLOSE_LOGITS = 1e-2  # as a share of the largest; neighbours in bfloat16 are 0.4 to 0.8 % apart
ROLLOUTS = 64
STOP_EVERY = 32  # of the vocabulary's tokens each 32nd ends a rollout, so that about each 32nd token that is drawn does
WEIGHT_SCALE = 1.5  # random weights of the usual size always say the same token


def make_models(preset: str, dtype: torch.dtype) -> tuple[MiniMindForCausalLM, torch.nn.Module]:
    """Our model and transformers' with the same random weights."""
    torch.manual_seed(0)
    config = MiniMindConfig.from_preset(preset, {"zero_init_output": False})
    ours = MiniMindForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "norm" not in name:
                parameter.mul_(WEIGHT_SCALE)
    theirs = peer_model(config).to(dtype).eval()
    # As `from_pretrained` leaves it: `.to` has rounded the frequencies of the positions too.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def make_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Prompts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def generate_theirs(
    model: torch.nn.Module, prompts: list[list[int]], new_tokens: int, stop_ids: list[int] | None = None
) -> list[list[int]]:
    """transformers' `generate` on a left-padded batch: greedily, or with stops drawn at temperature 1."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=stop_ids is not None,
            top_k=0,
            eos_token_id=stop_ids,
            pad_token_id=0,
        )
    return output[:, longest:].tolist()


def first_difference_is_a_tie(model: torch.nn.Module, prompt: list[int], mine: list[int], theirs: list[int]) -> bool:
    """Whether transformers' own logits of the two tokens at the first difference are too close to tell apart."""
    place = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + mine[:place]])).logits[0, -1].float()
    return abs(float(logits[mine[place]] - logits[theirs[place]])) <= CLOSE_LOGITS * float(logits.abs().max())


def measure_decoding(preset: str, turns: int, new_tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Tokens a second of both, alternating, and whether the tokens are the same."""
    rows = []
    say("| precision | batch | ours, tokens/s | transformers | ratio (least to greatest) | same tokens |")
    say("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = make_models(preset, dtype)
        decoder = Decoder(ours)
        for batch in BATCHES:
            prompts = make_prompts(batch, ours.config.vocab_size)
            seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
            for turn in range(turns + 1):
                started = time.perf_counter()
                mine = [reply.ids for reply in generate_tokens(decoder, prompts, new_tokens, stop_ids=[])]
                between = time.perf_counter()
                other = generate_theirs(theirs, prompts, new_tokens)
                ended = time.perf_counter()
                if turn:
                    seconds["ours"].append(between - started)
                    seconds["theirs"].append(ended - between)
            different = [i for i in range(batch) if mine[i] != other[i]]
            ties = sum(first_difference_is_a_tie(theirs, prompts[i], mine[i], other[i]) for i in different)
            ratios = [b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
            row = {
                "dtype": str(dtype).removeprefix("torch."),
                "batch": batch,
                "tokens_per_second": round(batch * new_tokens / statistics.median(seconds["ours"])),
                "transformers_tokens_per_second": round(batch * new_tokens / statistics.median(seconds["theirs"])),
                "ratio": [round(statistics.median(ratios), 2), round(min(ratios), 2), round(max(ratios), 2)],
                "different_answers": len(different),
                "that_parted_at_a_tie": ties,
            }
            rows.append(row)
            same = "all" if not different else f"{batch - len(different)} of {batch}; {ties} parted at a tie"
            say(
                f"| {row['dtype']} | {batch} | {row['tokens_per_second']:,} | "
                f"{row['transformers_tokens_per_second']:,} | {row['ratio'][0]:.2f} ({row['ratio'][1]:.2f} to "
                f"{row['ratio'][2]:.2f}) | {same} |"
            )
    return {"decoding": rows}


def measure_rollouts(preset: str, turns: int, new_tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Tokens a second that are drawn for 64 rollouts, alternating; replies end at lengths of their own.

    Ours includes what a step of training needs anew: the decoding copy of the weights, and the log-probabilities.
    """
    ours, theirs = make_models(preset, torch.float32)
    stop_ids = list(range(3, ours.config.vocab_size, STOP_EVERY))
    rows = []
    say("| prompts x replies | ours, tokens/s | transformers | ratio (least to greatest) | mean length |")
    say("|---|---|---|---|---|")
    for replies in (1, 8):
        prompts = [
            prompt for prompt in make_prompts(ROLLOUTS // replies, ours.config.vocab_size) for _ in range(replies)
        ]
        rates: dict[str, list[float]] = {"ours": [], "theirs": []}
        lengths: list[int] = []
        for turn in range(turns + 1):
            started = time.perf_counter()
            mine = sampler_of(ours, stop_ids, new_tokens, 1.0, turn)(prompts, [str(row) for row in range(ROLLOUTS)])
            between = time.perf_counter()
            torch.manual_seed(turn)
            other = generate_theirs(theirs, prompts, new_tokens, stop_ids)
            ended = time.perf_counter()
            own = [len(reply.ids) + (reply.stop_id is not None) for reply in mine]
            if turn:
                lengths += own
                rates["ours"].append(sum(own) / (between - started))
                rates["theirs"].append(sum(map(until_stop(stop_ids), other)) / (ended - between))
        ratios = [a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True)]
        row = {
            "prompts": ROLLOUTS // replies,
            "replies": replies,
            "tokens_per_second": round(statistics.median(rates["ours"])),
            "transformers_tokens_per_second": round(statistics.median(rates["theirs"])),
            "ratio": [round(statistics.median(ratios), 2), round(min(ratios), 2), round(max(ratios), 2)],
            "mean_length": round(statistics.mean(lengths), 1),
        }
        rows.append(row)
        say(
            f"| {row['prompts']} x {replies} | {row['tokens_per_second']:,} | "
            f"{row['transformers_tokens_per_second']:,} | {row['ratio'][0]:.2f} ({row['ratio'][1]:.2f} to "
            f"{row['ratio'][2]:.2f}) | {row['mean_length']} |"
        )
    return {"rollouts": rows}


def until_stop(stop_ids: list[int]) -> Callable[[list[int]], int]:
    """How many tokens a reply has up to its stop, without the padding behind it."""
    stops = set(stop_ids)
    return lambda reply: next((place + 1 for place, token in enumerate(reply) if token in stops), len(reply))
