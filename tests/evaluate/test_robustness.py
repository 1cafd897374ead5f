"""Damaged text: how much, always the same, and never more damage at a lower level."""

import difflib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mercer.data import LabelledSplit
from mercer.evaluate import add_typos, drop_words, flip_labels, perturb, robustness_curve

WORDS = ("The", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "42", "--", "naïve", "Oo")
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=30).map(" ".join)
seeds = st.integers(0, 50)


@given(text=texts, seed=seeds, level=st.floats(0, 1))
def test_dropping_keeps_a_subsequence_and_never_nothing(text, seed, level):
    kept = drop_words(text, level, seed).split()
    assert kept
    left = iter(text.split())
    assert all(word in left for word in kept)
    assert drop_words(text, 0.0, seed) == text
    assert len(drop_words(text, 1.0, seed).split()) == 1
    assert len(drop_words(text, level / 2, seed).split()) >= len(kept)


def is_one_error(word, typo):
    """Whether one edit, counting the swap of neighbours as one, leads from one word to the other."""
    if sorted(word) == sorted(typo):
        places = [i for i in range(len(word)) if word[i] != typo[i]]
        return len(places) == 2 and places[1] == places[0] + 1
    blocks = difflib.SequenceMatcher(None, word, typo, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) == max(len(word), len(typo)) - 1 and abs(len(word) - len(typo)) <= 1


@given(text=texts, seed=seeds, level=st.floats(0, 1))
def test_typos_are_one_visible_error_a_word_and_keep_the_spaces(text, seed, level):
    words = text.split(" ")
    all_wrong = add_typos(text, 1.0, seed).split(" ")
    assert len(all_wrong) == len(words)
    for word, typo in zip(words, all_wrong, strict=True):
        assert is_one_error(word, typo) if any(c.isalpha() for c in word) else word == typo
        assert typo
    some = add_typos(text, level, seed).split(" ")
    assert all(got in pair for got, *pair in zip(some, words, all_wrong, strict=True))
    assert add_typos(text, 0.0, seed) == text


def test_every_kind_of_typo_occurs():
    found = {add_typos("ab", 1.0, seed) for seed in range(200)}
    assert {"ba", "a", "b"} <= found
    assert any(len(word) == 3 for word in found)
    assert any(len(word) == 2 and word != "ba" for word in found)


@pytest.mark.parametrize("damage", [drop_words, add_typos])
def test_the_share_of_damaged_words_is_the_probability(damage):
    text = " ".join(f"word{'abcdefghij'[n % 10]}" for n in range(5000))
    after = damage(text, 0.3).split()
    damaged = (
        5000 - len(after) if damage is drop_words else sum(a != b for a, b in zip(text.split(), after, strict=True))
    )
    assert damaged / 5000 == pytest.approx(0.3, abs=4 * (0.21 / 5000) ** 0.5)


def test_labels_flip_at_the_given_rate_to_all_other_classes():
    labels = np.arange(6000) % 3
    some, more = flip_labels(labels, 0.2, 3), flip_labels(labels, 0.4, 3)
    wrong = some != labels
    assert wrong.mean() == pytest.approx(0.2, abs=4 * (0.16 / 6000) ** 0.5)
    assert (more[wrong] == some[wrong]).all()
    assert np.bincount((some - labels)[wrong] % 3).tolist() == pytest.approx([0, 600, 600], abs=100)
    assert flip_labels(labels, 1.0, 3).min() == 0
    assert (flip_labels(labels, 1.0, 3) != labels).all()
    np.testing.assert_array_equal(flip_labels(labels, 0.2, 3), some)
    assert (flip_labels(labels, 0.2, 3, seed=1) != some).any()


def test_perturbing_a_split_damages_pairs_too_and_no_label():
    split = LabelledSplit(("one two three",) * 2, ("four five six", "seven eight nine"), np.array([0, 1]))
    found = perturb(split, "drop", 1.0)
    assert all(len(text.split()) == 1 for text in (*found.texts, *(found.pairs or ())))
    assert found.labels is split.labels
    assert perturb(split, "typos", 0.0) is split


def test_a_curve_is_the_scores_of_the_damaged_splits():
    split = LabelledSplit(tuple(f"good and {n}" for n in range(40)), None, np.ones(40, int))

    def predict(examples):
        p = np.array([0.9 if "good" in text.split() else 0.2 for text in examples.texts])
        return np.stack([1 - p, p], axis=1)

    rows = robustness_curve(predict, split, "drop", [0.0, 0.5, 1.0], seed=3)
    assert [row.level for row in rows] == [0.0, 0.5, 1.0]
    for row in rows:
        share = np.mean(["good" in text.split() for text in perturb(split, "drop", row.level, 3).texts])
        assert row.accuracy == share
        assert row.log_loss == pytest.approx(-share * np.log(0.9) - (1 - share) * np.log(0.2))
        assert row.brier == pytest.approx(share * 0.01 + (1 - share) * 0.64)
        assert (row.kind, row.seed, row.num_examples) == ("drop", 3, 40)
    assert rows[0].accuracy == 1.0 > rows[1].accuracy > rows[2].accuracy


def test_what_cannot_be_measured_is_refused():
    split = LabelledSplit(("a",), None, np.array([0]))
    with pytest.raises(ValueError, match="unknown perturbation 'typo'; choose one of drop, typos"):
        perturb(split, "typo", 0.1)
    with pytest.raises(ValueError, match=r"probability \(1.5\) must be at least 0 and at most 1"):
        perturb(split, "drop", 1.5)
    with pytest.raises(ValueError, match="no levels to measure at"):
        robustness_curve(lambda _: np.zeros((1, 2)), split, "drop", [])
