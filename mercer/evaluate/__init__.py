"""How good a model is at what it was trained for."""

from mercer.evaluate.classification import ClassificationScores, Reliability, Score, classification_scores, reliability
from mercer.evaluate.perplexity import Evaluation, evaluate, token_losses
from mercer.evaluate.robustness import (
    RobustnessRow,
    add_typos,
    drop_words,
    flip_labels,
    perturb,
    robustness_curve,
)

__all__ = [
    "ClassificationScores",
    "Evaluation",
    "Reliability",
    "RobustnessRow",
    "Score",
    "add_typos",
    "classification_scores",
    "drop_words",
    "evaluate",
    "flip_labels",
    "perturb",
    "reliability",
    "robustness_curve",
    "token_losses",
]
