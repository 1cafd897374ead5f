"""The schedule by hand, and which parameters decay."""

import math

import pytest
import torch
from torch import nn

from mercer.hf import from_scratch
from mercer.train.optimiser import learning_rate, parameter_groups
from mercer.train.recipe import OptimConfig


def test_schedule_by_hand():
    config = OptimConfig(lr=2.0, warmup=0.1, min_lr_ratio=0.25)
    rates = [learning_rate(step, 20, config) for step in range(20)]
    assert rates[:2] == [1.0, 2.0]  # two steps of warm-up
    assert rates[2] == 2.0  # the top of the cosine
    assert rates[11] == pytest.approx(2.0 * (0.25 + 0.75 / 2))  # half way of 18
    assert rates[5] == pytest.approx(2.0 * (0.25 + 0.75 * (1 + math.cos(math.pi / 6)) / 2))
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert min(rates) > 0.5


def test_schedule_without_warmup_and_without_fall():
    assert learning_rate(0, 10, OptimConfig(lr=1.0, warmup=0.0)) == 1.0
    assert learning_rate(9, 10, OptimConfig(lr=1.0, warmup=0.0, min_lr_ratio=1.0)) == 1.0


class Skeleton(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.norm = nn.RMSNorm(4)
        self.q_proj = nn.Linear(4, 4)
        self.rescale_proj = nn.Linear(4, 2)
        self.gamma = nn.Parameter(torch.ones(2))
        self.log_ridge = nn.Parameter(torch.zeros(2))
        self.metric = nn.Parameter(torch.zeros(2, 2, 2))
        self.omega = nn.Parameter(torch.zeros(2, 8, 2))
        self.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        self.lm_head = nn.Linear(4, 5, bias=False)


def names(model, group):
    by_parameter = {p: name for name, p in model.named_parameters()}
    return {by_parameter[p] for p in group["params"]}


def test_only_matrices_that_multiply_activations_decay():
    model = Skeleton()
    decayed, kept = parameter_groups(model, OptimConfig(lr=1.0, weight_decay=0.3))
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert names(model, decayed) == {"q_proj.weight", "lm_head.weight"}
    assert names(model, kept) == {
        "embed_tokens.weight",
        "norm.weight",
        "q_proj.bias",
        "rescale_proj.weight",
        "rescale_proj.bias",
        "gamma",
        "log_ridge",
        "metric",
        "omega",
    }


def test_a_tied_weight_is_in_one_group_once():
    model = Skeleton()
    model.lm_head.weight = model.embed_tokens.weight
    groups = parameter_groups(model, OptimConfig(lr=1.0))
    assert sum(p is model.lm_head.weight for group in groups for p in group["params"]) == 1
    torch.optim.AdamW(groups)


def test_groups_of_a_real_model():
    model = from_scratch("tiny", "cubit", vocab_size=32, max_length=16)
    decayed, kept = parameter_groups(model, OptimConfig(lr=1.0))
    layer = "model.layers.0."
    ours = {name for name in names(model, decayed) if name.startswith(layer)}
    assert {name.removeprefix(layer).rpartition("self_attn.")[2] for name in ours} == {
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
        "o_proj.weight",
        "mixer.r_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }
    others = names(model, kept)
    assert "model.embed_tokens.weight" in others
    for ending in ("gamma", "log_ridge", "rescale_lower", "rescale_range", "rescale_proj.weight", "r_proj.bias"):
        assert sum(name.endswith(ending) for name in others) == 4  # one a layer
    assert len(names(model, decayed) | others) == len(list(model.parameters()))
