"""A recipe survives YAML, takes overrides, and refuses what it does not know by name."""

import pytest
import yaml

from mercer.train import config
from mercer.train.recipe import RECIPES, DataConfig, ModelConfig, OptimConfig, Recipe, TrainConfig, tiny


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_round_trips_through_yaml(name):
    recipe = RECIPES[name]()
    assert recipe.name == name
    assert config.from_dict(yaml.safe_load(config.write_yaml(recipe))) == recipe


def test_overrides_reach_every_kind_of_field():
    line = (
        "tiny --optim.lr 1e-3 --optim.betas=0.9,0.99 --train.steps 7 --train.shard true --seed 3 "
        "--data.source 123 --train.final-eval-windows null --model.mixer-options.ridge 1e-6 "
        "--model.mixer-options.share true --model.mixer_options.gamma softplus"
    )
    words, values = config.parse_overrides(line.split())
    assert words == ["tiny"]
    got = config.merge(tiny(), values)
    assert got.optim == OptimConfig(lr=1e-3, betas=(0.9, 0.99), warmup=tiny().optim.warmup)
    assert (got.train.steps, got.train.shard, got.train.final_eval_windows, got.seed) == (7, True, None, 3)
    assert got.data.source == "123"  # text stays text
    assert got.model.mixer_options == {"ridge": 1e-6, "share": True, "gamma": "softplus"}


def test_what_is_not_overridden_stays():
    assert config.merge(tiny(), {}) == tiny()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optim.lrr 1", "unknown option '--optim.lrr'; did you mean '--optim.lr'?"),
        ("--lr 1", "unknown option '--lr'; did you mean '--optim.lr'?"),
        ("--train.length 1", "unknown option '--train.length'; did you mean '--data.length'?"),
        ("--reusme", "unknown option '--reusme'; did you mean '--resume'?"),
        ("--optim.lr", "--optim.lr needs a value: --optim.lr VALUE"),
        ("--optim.lr fast", "optim.lr ('fast') must be a number"),
        ("--train.steps 1.5", "train.steps ('1.5') must be a whole number"),
        ("--train.shard maybe", "train.shard ('maybe') must be true or false"),
        ("--train.precision fp16", "unknown train.precision 'fp16'; choose one of bf16, float32"),
        ("--optim.betas 0.9", "optim.betas (0.9) must be 2 numbers, as 0.9,0.95"),
        ("--train.steps 0", "train.steps (0) must be at least 1"),
        ("--optim.warmup 100", "optim.warmup (100.0) is a share of the steps: it must lie in [0, 1)"),
        ("--model.hidden-size 30 --model.num-heads 4", "hidden_size (30) must be a multiple of num_heads (4)"),
    ],
)
def test_wrong_words_are_named(words, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        config.merge(tiny(), config.parse_overrides(words.split(), ["resume"])[1])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "tiny", "optim": {"lrr": 1}}, "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ({"name": "tiny", "optim": 3}, r"optim \(3\) must be a table"),
        ({"name": "tiny", "data": {"source": 3}}, r"data.source \(3\) must be text"),
        ({"name": "tinny"}, "unknown recipe 'tinny'.*did you mean 'tiny'"),
        ({"optim": {"lr": 1}}, "names no recipe"),
    ],
)
def test_wrong_tables_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        config.from_dict(values)


def test_a_partial_file_changes_only_what_it_names(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: tiny\noptim: {lr: 1e-3}\nmodel: {mixer: cubit, mixer_options: {share: true}}\n")
    got = config.from_dict(config.read_yaml(file))
    assert got.optim.lr == 1e-3
    assert got.model == ModelConfig(size="tiny", mixer="cubit", mixer_options={"share": True})
    assert got.train == tiny().train


@pytest.mark.parametrize(("text", "message"), [("a: [", "is not YAML"), ("- 1", "must hold a table")])
def test_a_file_that_is_no_table(tmp_path, text, message):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        config.read_yaml(file)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        config.read_yaml(tmp_path / "none.yaml")


def test_tokens_of_a_run():
    recipe = Recipe("x", data=DataConfig(length=8), train=TrainConfig(steps=3, batch_size=2, accumulate=5))
    assert recipe.train_tokens == 3 * 5 * 2 * 8
