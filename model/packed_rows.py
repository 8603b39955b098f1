"""Packed rows: several documents in one row that must not see each other.

`document_ids` (B, T) say it all: 0 is padding, 1, 2, .. are the documents of a row in order. From them come the
positions, the attention mask of the plain path, for CUDA the bounds of documents, and for a CPU's fast path the batches
of documents of like length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# Document lengths are rounded up to one of these (and on by 256); unused places cost time, more sizes cost calls.
LENGTH_STEPS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512)
# Queries that meet the same keys: those before them and their own. Smaller blocks skip more of what causality forbids,
# and cost more calls.
QUERY_BLOCK = 128
# Attention scores that are worked on at a time, about what the cores' caches hold: 7 % less time than all of a length.
STACK_BYTES = 4 * 2**20


def packed_rows_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T) -> (B, 1, T, T) additive: 0 where query and key are of the same document and the key is not later.

    Padding (id 0) sees padding, so that no query is left without a key, whose softmax would be NaN.
    """
    length = document_ids.shape[1]
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    allowed = same & torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril_()
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def packed_rows_positions(document_ids: Tensor) -> Tensor:
    """(B, T) -> (B, T): each token's distance from the start of its document."""
    places = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    is_start = _is_start(document_ids)
    return places - torch.where(is_start, places, 0).cummax(dim=1).values


def _is_start(document_ids: Tensor) -> Tensor:
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return is_start


@dataclass
class DocumentBounds:
    """Where documents begin in the flattened rows, as kernels of variable length take it. Padding counts as one."""

    bounds: Tensor  # (documents + 1,) int32: first tokens, and the end of the last document
    longest: int  # no document is longer than this


def document_bounds(document_ids: Tensor, device: torch.device) -> DocumentBounds:
    """document_ids (B, T), best on the CPU: on a GPU, finding the documents waits for it."""
    starts = _is_start(document_ids).flatten().nonzero()[:, 0]
    bounds = torch.cat((starts, starts.new_tensor([document_ids.numel()])))
    return DocumentBounds(bounds.to(device, torch.int32, non_blocking=True), document_ids.shape[1])


def bounded_attention(queries: Tensor, keys: Tensor, values: Tensor, documents: DocumentBounds) -> Tensor:
    """Causal grouped-query attention inside each document, by torch's varlen kernel (CUDA, half precision).

    queries (B, N, T, D), keys and values (B, K, T, D) -> (B, N, T, D).
    """
    flat = [states.transpose(1, 2).flatten(0, 1).to(values.dtype) for states in (queries, keys, values)]
    attended = varlen_attn(
        *flat,
        documents.bounds,
        documents.bounds,
        documents.longest,
        documents.longest,
        window_size=(-1, 0),  # causal
        enable_gqa=True,
    )
    return attended.view(len(queries), -1, *attended.shape[1:]).transpose(1, 2)


def has_bounded_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `bounded_attention` runs there: flash attention on Ampere or newer."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass
class Stack:
    """Places `begin` to `end` of some documents as queries, and all places before `end` as their keys."""

    documents: int
    begin: int
    end: int
    length: int  # places of each document among the keys
    first_query: int  # slot of the first document's first query
    first_key: int
    mask: Tensor  # (1, end - begin, end): 0, or -inf where the key is later than the query


@dataclass
class DocumentBatches:
    """Where each token of packed rows sits when documents of like length are stacked. Built once per forward pass.

    Slots are the places of all stacks, one stack after another. Gather indices address (token, head) pairs, and list
    them in the order (document, head, place) of each stack, so that one gather both selects and transposes.
    """

    stacks: list[Stack]  # a document's last places before its first: those see all keys
    state_rows: Tensor  # (slots * N + slots * K,): queries, then keys, as rows of (B * T * (N + K), D)
    state_slots: Tensor  # (B * T * (N + K),): the way back
    value_rows: Tensor  # (slots * K,): rows of (B * T * (N + 2 K), D)
    value_slots: Tensor  # (B * T * K,)
    output_rows: Tensor  # (slots * N,): rows of (B * T * N, D)
    output_slots: Tensor  # (B * T * N,)
    unused_rows: Tensor  # those of the slots * N that hold no token


def batch_documents(document_ids: Tensor, num_heads: int, num_key_heads: int, dtype: torch.dtype) -> DocumentBatches:
    """document_ids (B, T), 0 = padding -> where everything goes, for N query and K key/value heads."""
    starts, lengths = _document_spans(document_ids)
    steps = torch.tensor(LENGTH_STEPS)
    rounded = steps[torch.bucketize(lengths, steps).clamp_max_(len(steps) - 1)]
    rounded = torch.where(lengths > steps[-1], (lengths + 255) // 256 * 256, rounded)
    stacks: list[Stack] = []
    queries: list[tuple[Tensor, Tensor]] = []  # of each stack: tokens (documents, places), and which places are used
    keys: list[tuple[Tensor, Tensor]] = []  # of each group of documents
    first_query = first_key = 0
    for length in rounded.unique().tolist():
        blocks = _query_blocks(length)
        masks = [
            torch.full((1, end - begin, end), float("-inf"), dtype=dtype).triu_(1 + begin) for begin, end in blocks
        ]
        places = torch.arange(length)
        largest = max(mask.nbytes for mask in masks) * num_heads
        alike = (rounded == length).nonzero()[:, 0]
        for chosen in alike.split(_powers_of_two(len(alike), max(STACK_BYTES // largest, 1))):
            # Unused places read the tokens that follow. As keys they come after every query that matters, and as
            # queries their output is dropped, so what they hold has no effect.
            tokens = (starts[chosen, None] + places).clamp_max_(document_ids.numel() - 1)
            used = places < lengths[chosen, None]
            keys.append((tokens, used))
            for (begin, end), mask in zip(blocks, masks, strict=True):
                stacks.append(Stack(len(chosen), begin, end, length, first_query, first_key, mask))
                queries.append((tokens[:, begin:end], used[:, begin:end]))
                first_query += queries[-1][0].numel()
            first_key += tokens.numel()

    def rows(parts: list[tuple[Tensor, Tensor]], first_head: int, heads: int, all_heads: int) -> Tensor:
        head = torch.arange(first_head, first_head + heads)[:, None]
        return torch.cat([(token[:, None, :] * all_heads + head).flatten() for token, _ in parts])

    def used_slots(parts: list[tuple[Tensor, Tensor]], heads: int) -> Tensor:
        return torch.cat([mask[:, None, :].expand(-1, heads, -1).flatten() for _, mask in parts])

    query_used, key_used = used_slots(queries, num_heads), used_slots(keys, num_key_heads)
    state_heads = num_heads + num_key_heads
    state_rows = torch.cat(
        (rows(queries, 0, num_heads, state_heads), rows(keys, num_heads, num_key_heads, state_heads))
    )
    output_rows = rows(queries, 0, num_heads, num_heads)
    return DocumentBatches(
        stacks=stacks,
        state_rows=state_rows,
        state_slots=_inverse(state_rows, torch.cat((query_used, key_used))),
        value_rows=rows(keys, state_heads, num_key_heads, state_heads + num_key_heads),
        value_slots=_inverse(rows(keys, 0, num_key_heads, num_key_heads), key_used),
        output_rows=output_rows,
        output_slots=_inverse(output_rows, query_used),
        unused_rows=(~query_used).nonzero()[:, 0],
    )


def _powers_of_two(count: int, most: int) -> list[int]:
    """Powers of two, none above `most`, whose sum is `count`: with few sizes, kernels and memory come again."""
    parts = []
    while count:
        parts.append(1 << (min(count, most).bit_length() - 1))
        count -= parts[-1]
    return parts


def _query_blocks(length: int) -> list[tuple[int, int]]:
    """Begin and end of about equal blocks of at most `QUERY_BLOCK` places, the last block first."""
    count = -(-length // QUERY_BLOCK)
    size = -(-length // (16 * count)) * 16
    return [(begin, min(begin + size, length)) for begin in range(0, length, size)][::-1]


def _document_spans(document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """First token (in the flattened rows) and length of every document; padding in pieces of the smallest step."""
    is_start = _is_start(document_ids)
    is_start |= (document_ids == 0) & (torch.arange(document_ids.shape[1]) % LENGTH_STEPS[0] == 0)
    starts = is_start.flatten().nonzero()[:, 0]
    return starts, torch.diff(starts, append=starts.new_tensor([document_ids.numel()]))


def _inverse(rows: Tensor, used: Tensor) -> Tensor:
    """For each row its slot: every row stands in exactly one slot that is used."""
    slots = used.nonzero()[:, 0]
    result = torch.empty_like(slots)
    result[rows[slots]] = slots
    return result
