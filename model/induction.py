"""Starting weights in which attention already looks back: a model learns to copy from its context many steps earlier.

Copying takes two layers that work together (an induction head, Olsson et al. 2022, arXiv:2209.11895): one moves each
token's content to its successor, the next looks for the place whose predecessor is the present token, and what stands
there is the guess. From random weights that meeting is luck and comes late: `nano` guessed 41 % of the tokens of a
repeated list after 1.6M tokens, and 83 % with this start (EXPERIMENTS.md). Only starting values differ; the model
stays a plain Qwen3, and training may undo all of it.

Queries and keys that start alike and values that start as the output's transpose are the mimetic initialization of
Trockman and Kolter (2023, arXiv:2305.09828); with tied embeddings such an output raises the logit of what is attended.
"""

import torch
from torch import Tensor

from model.model_minimind import MiniMindAttention, MiniMindForCausalLM

WEIGHT_SCALE = 0.3  # of query, key and value rows; queries and keys are normalized, so theirs only slows their change
OUTPUT_SCALE = 0.5  # of output columns
NOISE = 0.3  # share of random directions in queries and keys, so that no two heads are the same
CONSTANT_SCALE = 2.0  # weight of the constant direction beside the noise in the heads that look at a fixed distance
FAST, SLOW = 0.1, 0.05  # radians a token: positions are told apart by faster pairs, contents matched by slower ones


@torch.no_grad()
def start_with_induction(model: MiniMindForCausalLM) -> bool:
    """Fill embedding and attention of a new model with starting values that copy; draws from torch's generator.

    Returns:
        False, having changed nothing, if the model is too small: it needs two layers, two heads, and a hidden size of
        three heads.
    """
    config, layers = model.config, model.model.layers
    head_size, hidden_size = config.head_dim, config.hidden_size
    if len(layers) < 2 or config.num_attention_heads < 2 or 3 * head_size > hidden_size:
        return False
    for layer in layers:
        _attend_to_the_like(layer.self_attn, hidden_size)
    # Where a token's own content is read, and where the contents of the one before and of the one before that go.
    content, previous, second = orthonormal_rows(3 * head_size, hidden_size).split(head_size)
    constant = torch.randn(hidden_size)
    for space in (content, previous, second):
        constant -= space.T @ (space @ constant)
    constant /= constant.norm()
    # A vector that all embeddings share changes no probability; heads that look at a distance find it everywhere.
    embedding = model.model.embed_tokens.weight
    embedding += constant * embedding.norm(dim=1).mean()
    turns = 1 / config.rope_theta ** (torch.arange(0, head_size, 2) / head_size)
    first_layer, second_layer = layers[0].self_attn, layers[1].self_attn
    for head, target in enumerate((previous, second)):
        _look_back(first_layer, head, head + 1, content, target, constant, turns)
    # The present token's like has been seen one place before; the previous token's like, two places before: that finds
    # the next word of a list, whose commas are all alike.
    for group, (asked, found) in enumerate(((content, previous), (previous, second))):
        if group < config.num_key_value_heads:
            _match(second_layer, group, asked, found, turns)
    if model.lm_head.weight is not embedding:
        model.lm_head.weight.copy_(embedding)
    return True


def orthonormal_rows(rows: int, columns: int) -> Tensor:
    """(rows, columns) matrix of random orthonormal rows; rows <= columns."""
    return torch.linalg.qr(torch.randn(columns, rows))[0].T


def by_head(attention: MiniMindAttention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the weights: queries (N, D, H), keys and values (K, D, H), outputs (H, N, D)."""
    size = attention.head_dim
    queries, keys, values = (
        projection.weight.view(-1, size, projection.in_features)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    return queries, keys, values, attention.o_proj.weight.view(attention.o_proj.out_features, -1, size)


def _attend_to_the_like(attention: MiniMindAttention, hidden_size: int) -> None:
    """Every head attends to tokens like the present one, and hands on what it attends to as it is."""
    queries, keys, values, outputs = by_head(attention)
    heads_of_key = len(queries) // len(keys)
    for group in range(len(keys)):
        key, value = (orthonormal_rows(attention.head_dim, hidden_size) for _ in range(2))
        keys[group], values[group] = WEIGHT_SCALE * key, WEIGHT_SCALE * value
        for head in range(group * heads_of_key, (group + 1) * heads_of_key):
            noise = orthonormal_rows(attention.head_dim, hidden_size)
            queries[head] = WEIGHT_SCALE * ((1 - NOISE) * key + NOISE * noise)
            outputs[:, head] = OUTPUT_SCALE * value.T


def _look_back(
    attention: MiniMindAttention,
    head: int,
    distance: int,
    content: Tensor,
    target: Tensor,
    constant: Tensor,
    turns: Tensor,
) -> None:
    """The head attends `distance` tokens back and writes the `content` (D, H) found there to `target` (D, H).

    Key and query are the same for all tokens, up to noise. RoPE turns each pair of dimensions by `turns` (D/2,) radians
    a token, so a query that starts turned back by the distance meets the key at that distance.
    """
    queries, keys, values, outputs = by_head(attention)
    group = head // (len(queries) // len(keys))
    half = len(turns)
    fast = (turns > FAST).float() / (turns > FAST).sum().sqrt()
    key = torch.cat([fast, torch.zeros(half)])
    query = torch.cat([fast * torch.cos(distance * turns), -fast * torch.sin(distance * turns)])
    for projection, vector in ((keys[group], key), (queries[head], query)):
        noise = orthonormal_rows(2 * half, constant.numel())
        projection.copy_(WEIGHT_SCALE * (CONSTANT_SCALE * torch.outer(vector, constant) + NOISE * noise))
    values[group] = WEIGHT_SCALE * content
    outputs[:, head] = 2 * OUTPUT_SCALE * target.T


def _match(attention: MiniMindAttention, group: int, asked: Tensor, found: Tensor, turns: Tensor) -> None:
    """The heads of a group attend where `found` (D, H) of a place holds what `asked` (D, H) of the present one does."""
    queries, keys, _, _ = by_head(attention)
    heads_of_key = len(queries) // len(keys)
    slow = (turns < SLOW).float().repeat(2)[:, None]
    heads = range(group * heads_of_key, (group + 1) * heads_of_key)
    for projection, space in ((keys[group], found), *((queries[head], asked) for head in heads)):
        projection.copy_(WEIGHT_SCALE * (slow * space + NOISE * orthonormal_rows(*space.shape)))
