"""How a classifier fares on text that is damaged: lost words, typing errors, wrong labels."""

import hashlib
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer

from mercer.data.labelled import LabelledSplit
from mercer.errors import unknown
from mercer.evaluate.classification import accuracy, brier, calibration_error, log_loss

Predict = Callable[[LabelledSplit], np.ndarray]  # probabilities [n, C] of the examples of a split


@dataclass(frozen=True)
class RobustnessRow:
    """The scores of one classifier at one level of damage under one seed."""

    kind: str
    level: float
    seed: int
    accuracy: float
    log_loss: float
    brier: float
    calibration_error: float
    num_examples: int


def drop_words(text: str, probability: float, seed: int = 0) -> str:
    """Leave out each word with a probability; at least one word stays.

    A pure function of its arguments. Under one seed, what is lost at a level is lost at every higher one.

    Args:
        text: words between white space; the white space before a word goes with it.
        probability: of each word to be left out.
        seed: of the draws; every text has draws of its own.

    >>> drop_words("one two three four five six", 0.5, seed=1)
    'three four'
    """
    _check_probability(probability)
    words = re.findall(r"\s*\S+", text)
    drawn = _generator(text, "drop", seed).random(len(words))
    kept = [word for word, draw in zip(words, drawn, strict=True) if draw >= probability]
    if not kept and words:
        kept = [words[int(drawn.argmax())]]
    return "".join(kept).lstrip()


def add_typos(text: str, probability: float, seed: int = 0) -> str:
    """Make one typing error in each word with a probability: swap, leave out, insert or substitute a letter.

    A pure function of its arguments. Under one seed, a word that is wrong at a level is wrong in the same way at every
    higher one. A word keeps at least one letter, a word without letters stays as it is, and an error always shows.

    Args:
        text: words between white space, which stays as it is.
        probability: of each word to get an error.
        seed: of the draws; every text has draws of its own.

    >>> add_typos("one two three four five six", 0.5, seed=1)
    'noe tow three foru fsive siq'
    """
    _check_probability(probability)
    parts = re.split(r"(\s+)", text)
    generator = _generator(text, "typos", seed)
    drawn = generator.random((len(parts), 4))  # all of them at every level, so that levels share their draws
    wrong = [
        _typo(part, *draws[1:]) if draws[0] < probability else part for part, draws in zip(parts, drawn, strict=True)
    ]
    return "".join(wrong)


def _typo(word: str, which: float, where: float, what: float) -> str:
    """Return a word with one error; three numbers in [0, 1) choose kind, place and letter."""
    letters = [place for place, character in enumerate(word) if character.isalpha()]
    if not letters:
        return word
    place = letters[int(where * len(letters))]
    letter = word[place]
    others = string.ascii_lowercase.replace(letter.lower(), "")
    other = others[int(what * len(others))]
    other = other.upper() if letter.isupper() else other
    swaps = [p for p in letters if p + 1 in letters and word[p] != word[p + 1]]
    kinds = ["insert", "substitute", *(["delete"] if len(letters) > 1 else []), *(["swap"] if swaps else [])]
    kind = kinds[int(which * len(kinds))]
    if kind == "swap":
        place = swaps[int(where * len(swaps))]
        return word[:place] + word[place + 1] + word[place] + word[place + 2 :]
    written = {"insert": letter + other, "substitute": other, "delete": ""}[kind]
    return word[:place] + written + word[place + 1 :]


def flip_labels(
    labels: Integer[np.ndarray, " n"], probability: float, num_classes: int, seed: int = 0
) -> Integer[np.ndarray, " n"]:
    """Replace each label with a probability by one of the other classes, all equally likely: noise for training.

    Under one seed, a label that is wrong at a level is wrong in the same way at every higher one.

    Args:
        labels: classes [n].
        probability: of each label to become a wrong one.
        num_classes: how many classes there are.
        seed: of the draws.

    >>> flip_labels(np.zeros(6, int), 1.0, 2).tolist()
    [1, 1, 1, 1, 1, 1]
    """
    _check_probability(probability)
    if num_classes < 2:
        raise ValueError(f"num_classes ({num_classes}) must be at least 2: another label needs another class")
    drawn = np.random.default_rng(seed).random((len(labels), 2))
    shift = 1 + (drawn[:, 1] * (num_classes - 1)).astype(labels.dtype)
    return np.where(drawn[:, 0] < probability, (labels + shift) % num_classes, labels)


PERTURBATIONS: dict[str, Callable[[str, float, int], str]] = {"drop": drop_words, "typos": add_typos}


def perturb(split: LabelledSplit, kind: str, probability: float, seed: int = 0) -> LabelledSplit:
    """Return a split with every text damaged, second texts of pairs too; labels stay.

    Args:
        split: examples.
        kind: `drop` or `typos`.
        probability: of each word to be damaged; 0 returns the texts as they are.
        seed: of the draws.

    Raises:
        ValueError: no such kind, or the probability is out of range.
    """
    if kind not in PERTURBATIONS:
        raise unknown("perturbation", kind, PERTURBATIONS)
    _check_probability(probability)
    if probability == 0:
        return split
    damage = PERTURBATIONS[kind]
    texts = tuple(damage(text, probability, seed) for text in split.texts)
    pairs = None if split.pairs is None else tuple(damage(text, probability, seed) for text in split.pairs)
    return LabelledSplit(texts, pairs, split.labels)


def robustness_curve(
    predict: Predict, split: LabelledSplit, kind: str, levels: Sequence[float], seed: int = 0
) -> list[RobustnessRow]:
    """Score a classifier on a split at each level of damage.

    Args:
        predict: returns the probabilities of the classes [n, C] for a split.
        split: undamaged examples.
        kind: `drop` or `typos`.
        levels: probabilities of a word to be damaged.
        seed: of the damage; the levels of one seed share their draws, so a curve is smoother than its error.

    Returns:
        A row for each level, in their order.

    Raises:
        ValueError: no such kind, no level, or a level out of range.

    Cost: one pass of `predict` a level.
    """
    if not levels:
        raise ValueError("no levels to measure at; give some, such as 0, 0.1, 0.2")
    rows = []
    for level in levels:
        p = predict(perturb(split, kind, level, seed))
        measured = [measure(p, split.labels) for measure in (accuracy, log_loss, brier, calibration_error)]
        rows.append(RobustnessRow(kind, float(level), seed, *measured, num_examples=len(split)))
    return rows


def _check_probability(probability: float) -> None:
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"probability ({probability}) must be at least 0 and at most 1")


def _generator(text: str, kind: str, seed: int) -> np.random.Generator:
    """Return draws that belong to this text, whatever stands around it."""
    digest = hashlib.blake2b(f"{seed}\0{kind}\0{text}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "big")))
