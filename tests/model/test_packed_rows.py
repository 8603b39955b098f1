"""Packed rows: a document's losses and gradients are what it would have alone, on the plain and on the fast path."""

import pytest
import torch

import model.fast_path
import model.model_minimind
import model.moe
import model.packed_rows
from model.packed_rows import batch_documents, packed_rows_mask, packed_rows_positions
from tests.model.helpers import packed_rows, tiny_model

# Longer than one stack of every kind; a document that fills its row; padding at the end; documents of one token.
LENGTHS = [[7, 40, 1, 30, 22], [100], [3, 3, 3, 64], [17, 16, 15]]
WINDOW = 100
# Several blocks of queries, blocks that are not full, and several documents of such a length.
LONG_LENGTHS = [[700], [300, 150, 200, 50], [260, 257, 129], [300, 400]]
LONG_WINDOW = 700


@pytest.fixture
def plain(monkeypatch):
    """Everything by the plain modules, however many tokens there are."""
    for module in (model.model_minimind, model.moe):
        monkeypatch.setattr(module, "is_fast", lambda hidden: False)


def losses_and_gradients(network, batch, dtype=None):
    network.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        output = network(**batch, return_token_losses=True)
    weights = torch.linspace(0.5, 1.5, batch["input_ids"].numel()).view_as(batch["input_ids"])
    total = (output.token_losses * weights).sum()
    if output.router_probability_sums is not None:
        total = total + 0.01 * output.router_probability_sums.square().sum()
    total.backward()
    return output, {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("use_moe", [False, True])
@pytest.mark.parametrize("path", ["plain", "fast"])
@torch.no_grad()
def test_packed_equals_alone(use_moe, path, request):
    if path == "plain":
        request.getfixturevalue("plain")
    network, batch = tiny_model(use_moe=use_moe), packed_rows(LENGTHS, WINDOW)
    together = network(**batch, return_token_losses=True).token_losses
    checked = 0
    for row, documents in enumerate(LENGTHS):
        start = 0
        for length in documents:
            tokens = batch["input_ids"][row : row + 1, start : start + length]
            logits = network(tokens).logits[0]
            expected = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
            torch.testing.assert_close(together[row, start + 1 : start + length], expected, rtol=0, atol=1e-5)
            assert together[row, start] == 0
            start += length
            checked += length - 1
        assert not together[row, start:].any()
    assert checked == int((batch["labels"] != -100).sum())


@pytest.mark.parametrize("cache_bytes", [None, 5000])
@pytest.mark.parametrize(("lengths", "window"), [(LENGTHS, WINDOW), (LONG_LENGTHS, LONG_WINDOW)])
@pytest.mark.parametrize("use_moe", [False, True])
def test_the_fast_path_equals_the_plain_one(use_moe, lengths, window, cache_bytes, monkeypatch):
    network, batch = tiny_model(use_moe=use_moe).train(), packed_rows(lengths, window)
    if cache_bytes:  # everything in many small pieces
        monkeypatch.setattr(model.fast_path, "BLOCK_BYTES", cache_bytes)
        monkeypatch.setattr(model.packed_rows, "STACK_BYTES", cache_bytes)
        monkeypatch.setattr(model.packed_rows, "QUERY_BLOCK", 32)
    fast, fast_gradients = losses_and_gradients(network, batch)
    monkeypatch.setattr(model.fast_path, "KEPT_PROBABILITY_BYTES", 0)
    _, recomputed_gradients = losses_and_gradients(network, batch)
    for module in (model.model_minimind, model.moe):
        monkeypatch.setattr(module, "is_fast", lambda hidden: False)
    plain, plain_gradients = losses_and_gradients(network, batch)
    torch.testing.assert_close(fast.token_losses, plain.token_losses, rtol=0, atol=1e-5)
    for name, gradient in plain_gradients.items():
        for other in (fast_gradients, recomputed_gradients):
            assert (other[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_the_fast_path_in_bfloat16_is_within_its_rounding(monkeypatch):
    """Both paths round; the fast one may not be further from fp32 than the plain one by more than half."""
    network, batch = tiny_model().train(), packed_rows(LENGTHS, WINDOW)
    exact, exact_gradients = losses_and_gradients(network, batch)
    errors = []
    for _ in range(2):
        output, gradients = losses_and_gradients(network, batch, torch.bfloat16)
        error = [(output.token_losses - exact.token_losses).norm() / exact.token_losses.norm()]
        error += [(gradients[name] - exact_gradients[name]).norm() / exact_gradients[name].norm() for name in gradients]
        errors.append(torch.stack(error))
        for module in (model.model_minimind, model.moe):
            monkeypatch.setattr(module, "is_fast", lambda hidden: False)
    fast, plain = errors
    assert fast.max() < 0.05 and fast.mean() < 1.5 * plain.mean()


def test_a_second_backward_pass_is_refused():
    """The first one writes over what the forward pass kept: gradients must not be silently wrong."""
    network, batch = tiny_model().train(), packed_rows(LENGTHS, WINDOW)
    total = network(**batch, return_token_losses=True).token_losses.sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("use_moe", [False, True])
def test_activation_checkpointing_on_packed_rows(use_moe):
    batch, results = packed_rows(LENGTHS, WINDOW), []
    for checkpointing in (False, True):
        network = tiny_model(use_moe=use_moe).train()
        if checkpointing:
            network.activation_checkpointing_enable()
        results.append(losses_and_gradients(network, batch)[1])
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name])


@pytest.mark.parametrize("use_moe", [False, True], ids=["dense", "moe"])
def test_weights_cast_once_are_those_of_the_step(use_moe):
    """Two micro-batches share the copies of the weights, and those of the next step are made anew."""
    batches = [packed_rows([[90, 40], [128]], 160, seed) for seed in (0, 1)]
    network = tiny_model(use_moe=use_moe).train()
    for _ in range(2):
        expected = [losses_and_gradients(network, batch, torch.bfloat16) for batch in batches]
        with model.fast_path.weights_cast_once():
            found = [losses_and_gradients(network, batch, torch.bfloat16) for batch in batches]
            copies = model.fast_path._copies.get()
            assert len(copies) == 2 * (1 + 2 * (4 if use_moe else 1)), "q/k/v, gate/up and down in each of two layers"
        for (output, gradients), (again, same) in zip(expected, found, strict=True):
            assert torch.equal(output.token_losses, again.token_losses)
            assert all(torch.equal(gradients[name], same[name]) for name in gradients)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1.5)


def test_positions_restart_and_the_mask_isolates():
    ids = torch.tensor([[1, 1, 2, 2, 2, 0, 0]])
    assert packed_rows_positions(ids).tolist() == [[0, 1, 0, 1, 2, 0, 1]]
    allowed = packed_rows_mask(ids, torch.float32)[0, 0] == 0
    expected = torch.zeros(7, 7, dtype=torch.bool)
    for first, last in ((0, 2), (2, 5), (5, 7)):
        expected[first:last, first:last] = torch.ones(last - first, last - first).tril().bool()
    assert torch.equal(allowed, expected)


def test_every_token_has_one_place_in_the_stacks():
    ids = packed_rows([*LENGTHS, []], WINDOW)["document_ids"]
    documents = batch_documents(ids, 3, 1, torch.float32)
    places = torch.arange(ids.numel() * 3)
    assert torch.equal(documents.output_rows[documents.output_slots], places)
    assert torch.equal(documents.state_rows[documents.state_slots].sort().values, torch.arange(ids.numel() * 4))
    assert set(documents.unused_rows.tolist()).isdisjoint(documents.output_slots.tolist())
    assert len(documents.unused_rows) + len(places) == len(documents.output_rows)


def test_long_documents_are_queried_in_blocks_that_see_no_later_keys():
    stacks = batch_documents(torch.ones(1, 1300, dtype=torch.long), 2, 1, torch.float32).stacks
    assert {(stack.documents, stack.length) for stack in stacks} == {(1, 1536)}
    assert [(stack.begin, stack.end) for stack in stacks] == [(end - 128, end) for end in range(1536, 0, -128)]
    assert [stack.first_query for stack in stacks] == list(range(0, 1536, 128))


def test_padding_influences_nothing():
    network, batch = tiny_model(use_moe=True).train(), packed_rows(LENGTHS, WINDOW)
    changed = batch | {"input_ids": torch.where(batch["document_ids"] == 0, 5, batch["input_ids"])}
    first, gradients = losses_and_gradients(network, batch)
    second, changed_gradients = losses_and_gradients(network, changed)
    torch.testing.assert_close(first.token_losses, second.token_losses, rtol=1e-6, atol=1e-6)
    for name in gradients:
        torch.testing.assert_close(gradients[name], changed_gradients[name], rtol=1e-4, atol=1e-5)


def test_dropout_acts_in_training_only():
    network, batch = tiny_model(dropout=0.3), packed_rows(LENGTHS, WINDOW)
    torch.manual_seed(0)
    losses = [
        network.train(mode)(**batch, return_token_losses=True).token_losses for mode in (True, True, False, False)
    ]
    assert not torch.equal(losses[0], losses[1]) and torch.equal(losses[2], losses[3])


def test_adapters_keep_their_own_forward():
    """The fused product must not bypass a module that replaces a plain linear layer."""

    class Doubled(torch.nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    network, batch = tiny_model(), packed_rows(LENGTHS, WINDOW)
    before = network(**batch, return_token_losses=True).token_losses
    attention = network.model.layers[0].self_attn
    replaced = Doubled(32, 32, bias=False)
    replaced.weight = torch.nn.Parameter(attention.v_proj.weight / 2)
    attention.v_proj = replaced
    torch.testing.assert_close(network(**batch, return_token_losses=True).token_losses, before)


def test_arguments_that_contradict_each_other_are_refused():
    network, batch = tiny_model(), packed_rows([[20]], 32)
    with pytest.raises(ValueError, match="attention_mask"):
        network(**batch, attention_mask=torch.ones(1, 32))
    with pytest.raises(ValueError, match="needs labels"):
        network(batch["input_ids"], return_token_losses=True)
    with pytest.raises(ValueError, match="exactly one"):
        network()
