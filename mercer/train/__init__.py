"""Recipes, one training loop, exact checkpoints and the record of a run.

Importing this package does not import torch, so that the command line can name recipes at once; the loop is
`mercer.train.loop.train`.
"""

from mercer.train.recipe import RECIPES, Recipe
from mercer.train.record import Run, read_runs

__all__ = ["RECIPES", "Recipe", "Run", "read_runs"]
