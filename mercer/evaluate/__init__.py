"""How good a model is at what it was trained for."""

from mercer.evaluate.classification import ClassificationScores, Reliability, Score, classification_scores, reliability
from mercer.evaluate.perplexity import Evaluation, evaluate, token_losses

__all__ = [
    "ClassificationScores",
    "Evaluation",
    "Reliability",
    "Score",
    "classification_scores",
    "evaluate",
    "reliability",
    "token_losses",
]
