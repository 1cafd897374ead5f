"""Recall of a fact: does a model name a number it has read once, so many tokens ago?"""

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

_PLACES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Delhi", "Seoul", "Perth", "Milan", "Kyoto", "Tunis", "Accra")


@dataclasses.dataclass(frozen=True)
class Recall:
    """How well facts at one distance were recalled, over the trials."""

    distance: int  # tokens between the end of the fact and its number's second mention
    accuracy: float  # share of trials in which every token of the number was the likeliest
    loss: float  # nats per token of the number
    trials: int


@dataclasses.dataclass(frozen=True)
class Question:
    """A text that states a fact, goes on about something else, and asks for it; the answer ends it."""

    ids: Int[Tensor, " T"]
    answer: int  # how many tokens of the end are the answer


def questions(
    tokenizer: Any, filler: Sequence[int], distance: int, *, trials: int, seed: int = 0
) -> Iterator[Question]:
    """Yield texts: filler, `The code of Oslo is 4821.`, filler over the distance, `The code of Oslo is 4821`.

    Args:
        tokenizer: of the model.
        filler: tokens of ordinary text, at least `distance` of them.
        distance: tokens between the fact's number and the answer.
        trials: how many; each its own place, number and stretch of filler.
        seed: of these.

    Raises:
        ValueError: the distance is shorter than the question, or the filler than the distance.
    """
    draw = random.Random(seed)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for _ in range(trials):
        place, number = draw.choice(_PLACES), draw.randrange(1000, 10000)
        fact = f"\nThe code of {place} is"
        asked, stated = (_tokens(tokenizer, text) for text in (fact, f"{fact} {number}"))
        answer = stated[len(asked) :]
        after = _tokens(tokenizer, f"{fact} {number}.")[len(stated) :]
        between = distance - len(after) - len(asked)
        if between < 0:
            raise ValueError(f"distance ({distance}) must be at least {distance - between}, the tokens of the question")
        if len(filler) < between + 16:
            raise ValueError(f"the filler has {len(filler)} tokens; a distance of {distance} needs {between + 16}")
        start = draw.randrange(len(filler) - between - 15)
        lead, middle = list(filler[start : start + 16]), list(filler[start + 16 : start + 16 + between])
        ids = [*begin, *lead, *stated, *after, *middle, *asked, *answer]
        yield Question(torch.tensor(ids), len(answer))


@torch.no_grad()
def recall(
    model: Any, tokenizer: Any, filler: Sequence[int], distances: Sequence[int], *, trials: int = 20, seed: int = 0
) -> list[Recall]:
    """Measure how well a causal language model recalls a number over each distance.

    Args:
        model: called as `model(input_ids=..., use_cache=False).logits`.
        tokenizer: the model's.
        filler: tokens of ordinary text, longer than the longest distance.
        distances: in tokens; those beyond a window show what the far field carries.
        trials: texts for each distance, the same for every model.
        seed: of the texts.

    Raises:
        ValueError: see `questions`.

    Cost: one forward pass a trial and distance.
    """
    found = []
    for distance in distances:
        asked = questions(tokenizer, filler, distance, trials=trials, seed=seed)
        found.append(dataclasses.replace(recall_of(model, asked), distance=distance))
    return found


@torch.no_grad()
def recall_of(model: Any, asked: Iterable[Question]) -> Recall:
    """Measure how well a model answers questions, whatever their distance (0 is what is written for it)."""
    device = next(model.parameters()).device
    hits, losses, tokens, trials = 0, 0.0, 0, 0
    for question in asked:
        ids = question.ids[None].to(device)
        scores = _answer_scores(model(input_ids=ids, use_cache=False).logits[0], question.answer)
        answer = ids[0, -question.answer :]
        hits += int((scores.argmax(-1) == answer).all())
        losses -= scores.gather(-1, answer[:, None]).sum().item()
        tokens, trials = tokens + question.answer, trials + 1
    return Recall(0, hits / trials, losses / tokens, trials)


def filler_of(batches: Iterable[Any], tokenizer: Any, count: int) -> list[int]:
    """Return the first `count` tokens of ordinary text in packed batches, or as many as there are."""
    special, found = set(tokenizer.all_special_ids), []
    for batch in batches:
        found += [token for token in batch.input_ids.flatten().tolist() if token not in special]
        if len(found) >= count:
            break
    return found[:count]


def _answer_scores(logits: Float[Tensor, "T V"], answer: int) -> Float[Tensor, "n V"]:
    """Return the log probabilities from which the last `answer` tokens are read."""
    return logits[-answer - 1 : -1].float().log_softmax(-1)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids
