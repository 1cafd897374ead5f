"""Recall: the text says what it should, a perfect model scores 1, and a window cannot know what lies beyond it."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mercer
from mercer.data import build_tokenizer
from mercer.evaluate.recall import questions, recall

FILLER = list(b"It was a bright cold day, and nothing at all happened for a very long time. " * 8)
VOCABULARY = 300


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("byte", [], None)


class Oracle(torch.nn.Module):
    """Predict every next token of the text with probability 3/4, or never."""

    def __init__(self, knows):
        super().__init__()
        self.knows, self.weight = knows, torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, use_cache):
        coming = torch.roll(input_ids, -1, 1) if self.knows else torch.zeros_like(input_ids)
        probability = torch.full((*input_ids.shape, VOCABULARY), 0.25 / (VOCABULARY - 1))
        return SimpleNamespace(logits=probability.scatter(-1, coming[..., None], 0.75).log())


@pytest.mark.parametrize("distance", [40, 200])
def test_the_fact_is_stated_once_and_asked_for_after_the_distance(tokenizer, distance):
    texts = set()
    for question in questions(tokenizer, FILLER, distance, trials=5):
        text = tokenizer.decode(question.ids, skip_special_tokens=True)
        asked, number = text[text.rindex("\n") :].rsplit(" ", 1)
        assert asked.startswith("\nThe code of ")
        assert len(number) == question.answer - 1 == 4  # the space before it is a token of the answer
        assert text.count(f"{asked} {number}") == 2
        first, last = (text.encode().index(number.encode()), text.encode().rindex(number.encode()))
        assert last - first - len(number) == distance + 1
        texts.add(text)
    assert len(texts) == 5


def test_scores_by_hand(tokenizer):
    (perfect,) = recall(Oracle(True), tokenizer, FILLER, [50], trials=3)
    assert (perfect.distance, perfect.accuracy, perfect.trials) == (50, 1.0, 3)
    assert perfect.loss == pytest.approx(-math.log(0.75), rel=1e-5)
    (blind,) = recall(Oracle(False), tokenizer, FILLER, [50], trials=3)
    assert blind.accuracy == 0.0
    assert blind.loss == pytest.approx(-math.log(0.25 / (VOCABULARY - 1)), rel=1e-5)


def test_a_window_cannot_know_a_fact_beyond_its_reach(tokenizer):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = mercer.attach(
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval(), "window", window=8, sinks=2
    )
    far = next(questions(tokenizer, FILLER, 60, trials=1)).ids[None]  # two layers of 8 tokens reach 14 back
    near = far.clone()
    place = far.shape[1] - 5 - 60 - 4
    near[0, place : place + 4] = torch.tensor(list(b"0000"))
    assert not torch.equal(near, far)
    ask = far.shape[1] - 5  # the space, from which the number's first digit is predicted
    assert torch.equal(model(far).logits[0, ask], model(near).logits[0, ask])
    softmax = mercer.detach(model)
    assert not torch.equal(softmax(far).logits[0, ask], softmax(near).logits[0, ask])


def test_refusals(tokenizer):
    with pytest.raises(ValueError, match=r"distance \(3\) must be at least"):
        list(questions(tokenizer, FILLER, 3, trials=1))
    with pytest.raises(ValueError, match="the filler has 40 tokens; a distance of 100 needs"):
        list(questions(tokenizer, FILLER[:40], 100, trials=1))
