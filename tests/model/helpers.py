"""Small random models and packed rows for the model's tests."""

import torch

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM

VOCABULARY = 97


def tiny_config(**overrides) -> MiniMindConfig:
    """A model of two layers, 32 wide, whose output projections are random rather than zero."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "zero_init_output": False,
        "initializer_range": 0.15,
    }
    return MiniMindConfig(**(fields | overrides))


def tiny_model(seed: int = 0, **overrides) -> MiniMindForCausalLM:
    """A random model whose norms are not all ones, in evaluation mode."""
    torch.manual_seed(seed)
    model = MiniMindForCausalLM(tiny_config(**overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def random_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """(rows, length) ids that are no control tokens."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def packed_rows(lengths: list[list[int]], window: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows that hold documents of the given lengths, padded to the window: input_ids, labels, document_ids (B, T)."""
    input_ids = random_tokens(len(lengths), window, seed)
    labels = input_ids.clone()
    document_ids = torch.zeros_like(input_ids)
    for row, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate(documents, start=1):
            document_ids[row, start : start + length] = number
            labels[row, start] = -100
            start += length
        labels[row, start:] = -100
    return {"input_ids": input_ids, "labels": labels, "document_ids": document_ids}
