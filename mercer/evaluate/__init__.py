"""How good a model is at what it was trained for."""

from mercer.evaluate.classification import ClassificationScores, Reliability, Score, classification_scores, reliability
from mercer.evaluate.harness import TaskScore, evaluate_tasks, harness_model
from mercer.evaluate.perplexity import Evaluation, evaluate, token_losses
from mercer.evaluate.recall import Recall, recall
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
    "Recall",
    "Reliability",
    "RobustnessRow",
    "Score",
    "TaskScore",
    "add_typos",
    "classification_scores",
    "drop_words",
    "evaluate",
    "evaluate_tasks",
    "flip_labels",
    "harness_model",
    "perturb",
    "recall",
    "reliability",
    "robustness_curve",
    "token_losses",
]
