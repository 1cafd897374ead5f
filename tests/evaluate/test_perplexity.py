"""Evaluation is the mean over tokens, whatever the batches, and its parts add up to it."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mercer.evaluate import evaluate, token_losses
from mercer.evaluate.perplexity import position_edges


@dataclasses.dataclass(frozen=True)
class Batch:
    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    num_bytes: int


class Bigram(nn.Module):
    """Predicts the next token from this one alone; remembers how it was called."""

    def __init__(self, vocabulary=11):
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)
        self.calls = []

    def forward(self, input_ids, position_ids, use_cache):
        self.calls.append((self.training, use_cache, torch.is_grad_enabled()))
        return SimpleNamespace(logits=self.table(input_ids))


def batch(rows, length=7, ignored=0):
    ids = torch.randint(0, 11, (rows, length))
    labels = ids.clone()
    labels[:, 1 : 1 + ignored] = -100
    return Batch(ids, labels, torch.arange(length).expand(rows, length), num_bytes=3 * rows)


def by_hand(model, batches):
    losses = []
    for b in batches:
        for row in range(len(b.input_ids)):
            for t in range(b.input_ids.shape[1] - 1):
                if b.labels[row, t + 1] != -100:
                    logits = model.table.weight[b.input_ids[row, t]].double()
                    losses.append(-F.log_softmax(logits, -1)[b.input_ids[row, t + 1]].item())
    return losses


def test_equals_the_definition_over_uneven_batches():
    model, batches = Bigram(), [batch(3), batch(1), batch(2, ignored=4)]
    losses = by_hand(model, batches)
    found = evaluate(model, batches)
    assert found.num_tokens == len(losses) == 3 * 6 + 6 + 2 * 2
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.num_bytes == 18
    assert found.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / 18, rel=1e-6)


def test_batching_does_not_matter():
    model, whole = Bigram(), batch(4)
    rows = [Batch(whole.input_ids[i : i + 1], whole.labels[i : i + 1], whole.position_ids[:1], 3) for i in range(4)]
    one, many = evaluate(model, [whole]), evaluate(model, rows)
    assert one.loss == pytest.approx(many.loss, rel=1e-6)
    assert one.accuracy == many.accuracy


def test_parts_by_position_add_up():
    model = Bigram()
    found = evaluate(model, [batch(5, length=40), batch(2, length=40, ignored=30)])
    assert sum(tokens for *_, tokens in found.loss_by_position) == found.num_tokens
    total = sum(loss * tokens for *_, loss, tokens in found.loss_by_position)
    assert total / found.num_tokens == pytest.approx(found.loss, rel=1e-9)
    starts = [start for start, *_ in found.loss_by_position]
    assert starts == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def test_position_is_that_in_the_document():
    ids = torch.tensor([[1, 2, 3, 4]])
    labels = torch.tensor([[1, 2, -100, 4]])  # the third token begins a document
    found = evaluate(Bigram(), [Batch(ids, labels, torch.tensor([[0, 1, 0, 1]]), 4)])
    assert [(start, end, tokens) for start, end, _, tokens in found.loss_by_position] == [(0, 1, 2)]


def test_accuracy():
    model = Bigram(3)
    model.table.weight.data = torch.eye(3).roll(1, 1)  # after i comes i + 1
    ids = torch.tensor([[0, 1, 2, 0, 0]])
    assert evaluate(model, [Batch(ids, ids, torch.arange(5)[None], 5)]).accuracy == 0.75


def test_model_is_called_without_cache_gradient_or_training_mode_and_left_as_it_was():
    model = Bigram().train()
    evaluate(model, [batch(1)])
    assert model.calls == [(False, False, False)]
    assert model.training


def test_shares_of_many_processes_add_up():
    model, batches = Bigram(), [batch(3), batch(1)]
    others = []
    evaluate(model, batches[1:], reduce=lambda sums: others.append(sums.clone()))

    def add(sums):
        sums += others.pop(0)

    found = evaluate(model, batches[:1], reduce=add)
    whole = evaluate(model, batches)
    assert found.loss == pytest.approx(whole.loss, rel=1e-12)
    assert (found.num_tokens, found.num_bytes, found.accuracy) == (whole.num_tokens, whole.num_bytes, whole.accuracy)


def test_nothing_to_predict():
    with pytest.raises(ValueError, match="no batch has a token to predict"):
        evaluate(Bigram(), [batch(2, ignored=6)])


def test_losses_are_float32_from_half_precision_logits():
    logits = torch.randn(2, 3, 5)
    losses = token_losses(logits.to(torch.bfloat16), torch.zeros(2, 3, dtype=torch.long))
    assert losses.dtype == torch.float32
    assert losses.shape == (2, 2)


@pytest.mark.parametrize("length", [1, 2, 3, 17, 256, 1000])
def test_edges_rise_from_nought_to_the_length(length):
    edges = position_edges(length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert edges == sorted(set(edges))
