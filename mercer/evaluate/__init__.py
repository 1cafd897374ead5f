"""How good a model is at what it was trained for."""

from mercer.evaluate.perplexity import Evaluation, evaluate, token_losses

__all__ = ["Evaluation", "evaluate", "token_losses"]
