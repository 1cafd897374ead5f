"""Classifiers in two phases: what each may change, what a run leaves behind, and how it goes on after a break."""

import dataclasses
import io
import json
import random

import pytest
import torch
import yaml
from cyclopts import App, Parameter
from rich.console import Console
from safetensors.torch import load_file

from mercer.cli.classifiers import align_recipe, finetune_recipe, is_classifier, read_classifier
from mercer.hf import load
from mercer.train import config
from mercer.train.classifier import align_classifier, classifier_card, finetune_classifier
from mercer.train.classifier_recipe import CLASSIFIERS, tiny_classifier
from mercer.train.classifier_setup import build_classifier, load_labelled
from mercer.train.folder import RunFolder
from mercer.train.record import read_runs

GOOD, BAD = ("good", "fine", "lovely"), ("bad", "poor", "awful")
FILLERS = ("a", "the", "film", "plot", "scene", "of", "and", "with")


def change(recipe, section, **values):
    return dataclasses.replace(recipe, **{section: dataclasses.replace(getattr(recipe, section), **values)})


@pytest.fixture(scope="session")
def reviews(tmp_path_factory):
    """Return a folder of splits whose label is the sign of one word."""
    draw, folder = random.Random(0), tmp_path_factory.mktemp("reviews")
    for split, count in (("train", 60), ("validation", 20), ("test", 20)):
        rows = []
        for number in range(count):
            words = draw.choices(FILLERS, k=draw.randrange(3, 9))
            words.insert(draw.randrange(len(words)), draw.choice((BAD, GOOD)[number % 2]))
            rows.append(f"{number % 2}\t{' '.join(words)} {number}")
        (folder / f"{split}.tsv").write_text("label\ttext\n" + "\n".join(rows) + "\n")
    return folder


@pytest.fixture
def recipe(reviews):
    recipe = change(tiny_classifier(), "data", source=str(reviews), tokenizer="bpe:300", length=16)
    recipe = change(recipe, "model", hidden_size=8, num_layers=2, intermediate_size=16, dropout=0.3)
    recipe = change(recipe, "model", mixer_options={"features": "softplus", "num_features": 6})
    recipe = change(recipe, "align", epochs=2, batch_size=20, check_batches=1)
    return change(recipe, "train", epochs=2, batch_size=20, checkpoint_every=0)


def tensors(folder):
    return load_file(folder / "model" / "model.safetensors")


def rows(folder):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in RunFolder(folder).rows()]


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def both(recipe, tmp_path):
    """Return the recipe of phase B after phase A, and the folders of both."""
    aligned, tuned = tmp_path / "aligned", tmp_path / "tuned"
    align_classifier(recipe, aligned)
    after = dataclasses.replace(recipe, start=str(aligned))
    finetune_classifier(after, tuned)
    return after, aligned, tuned


def test_each_phase_changes_what_it_may_and_nothing_else(recipe, both):
    _, aligned, tuned = both
    start = build_classifier(recipe, load_labelled(recipe.data, recipe.seed)).state_dict()
    middle, end = tensors(aligned), tensors(tuned)
    assert start.keys() == middle.keys() == end.keys()
    moved = {name for name in start if not torch.equal(start[name], middle[name])}
    assert moved == {name for name in start if name.endswith("omega")}
    assert len(moved) == 2
    kept = {name for name in start if torch.equal(middle[name], end[name])}
    assert kept == moved
    assert max(middle[name].norm(dim=-1).max() for name in moved) <= 1.5


def test_what_the_runs_leave_behind(recipe, both):
    after, aligned, tuned = both
    for folder in (aligned, tuned):
        assert {p.name for p in folder.iterdir()} >= {
            "config.yaml", "environment.json", "metrics.jsonl", "model", "results.json",
        }  # fmt: skip
    history = rows(aligned)
    assert [row["step"] for row in history] == [1, 2, 3, 4, 5, 6]
    names = {"alignment", "repulsion", "least_distance", "drift"}
    assert all(names <= row.keys() for row in history)
    assert [row["checked"] is not None for row in history] == [False, False, True] * 2
    assert all(row["train_loss"] == pytest.approx(1e-3 * row["repulsion"] - row["alignment"]) for row in history)
    (first,), (second,) = read_runs(aligned), read_runs(tuned)
    assert first.measures["phase"] == "align"
    assert first.measures["after"] == history[-1]["checked"]
    assert first.measures["before"]["step"] == 0
    assert first.measures["validation_alignment"].keys() == {"before", "after"}
    assert (first.valid_loss, second.status, second.steps) == (None, "done", 6)
    scores = second.measures["validation"]
    assert {"accuracy", "matthews", "log_loss", "brier", "calibration_error", "auc"} <= scores.keys()
    assert second.measures["test"]["num_examples"] == 20
    assert second.valid_loss == scores["log_loss"]["value"]
    assert rows(tuned)[-1]["valid_loss"] == pytest.approx(second.valid_loss)
    text = (tuned / "config.yaml").read_text()
    again = config.from_dict(yaml.safe_load(text), CLASSIFIERS)
    assert again.start == after.start
    assert "particles aligned" in classifier_card(second)
    model = load(tuned / "model")
    assert (type(model).__name__, model.config.num_labels) == ("MercerBertForSequenceClassification", 2)


@pytest.mark.parametrize("phase", [align_classifier, finetune_classifier])
def test_a_run_with_a_break_is_the_run_without(recipe, tmp_path, phase):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = phase(recipe, whole)
    first = phase(recipe, parts, should_stop=lambda step: step == 2)
    assert (first.status, first.steps) == ("interrupted", 2)
    resumed = phase(recipe, parts, resume=True)
    assert rows(parts) == rows(whole)
    assert same(tensors(parts), tensors(whole))
    assert resumed.measures == run.measures
    with pytest.raises(ValueError, match="was started with seed 0, not 1"):
        phase(dataclasses.replace(recipe, seed=1), parts, resume=True)


def test_a_classifier_learns(recipe, tmp_path):
    recipe = change(change(recipe, "train", epochs=30), "model", dropout=0.0, hidden_size=16, num_layers=1)
    run = finetune_classifier(change(recipe, "optim", lr=1e-2), tmp_path)
    assert run.measures["test"]["accuracy"]["value"] > 0.9


def test_directions_that_are_parameters_stay_too(recipe, tmp_path):
    recipe = change(recipe, "model", mixer="lfk", mixer_options={"num_features": 6})
    recipe = change(recipe, "align", radius=10.0)  # they start at norm sqrt(D)
    align_classifier(recipe, tmp_path / "a")
    finetune_classifier(dataclasses.replace(recipe, start=str(tmp_path / "a")), tmp_path / "b")
    before, after = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if name.endswith("omega")
    }


def test_it_stops_early_and_shows_its_energy(recipe, tmp_path):
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=120)
    run = align_classifier(change(recipe, "align", tolerance=1e9, check_every=2), tmp_path, console=console)
    assert (run.status, run.steps, run.measures["converged"]) == ("done", 2, True)
    assert "align softplus seed 0" in terminal.getvalue()
    assert "energy -" in terminal.getvalue()


def test_what_does_not_fit_is_refused_before_anything_is_written(recipe, tmp_path, monkeypatch):
    def fails(phase, recipe, message, kind=ValueError):
        with pytest.raises(kind, match=message):
            phase(recipe, tmp_path / "x")
        assert not (tmp_path / "x").exists()

    softmax = change(recipe, "model", mixer="softmax", mixer_options={})
    fails(align_classifier, softmax, "mixer 'softmax' has no random features to align")
    options = {"features": "cos2", "redraw_steps": 4}
    fails(finetune_classifier, change(recipe, "model", mixer_options=options), r"redraw_steps \(4\) would replace")
    options = {"features": "cosine"}
    fails(align_classifier, change(recipe, "model", mixer_options=options), "unknown feature map 'cosine'")
    missing = dataclasses.replace(recipe, start=str(tmp_path / "none"))
    fails(finetune_classifier, missing, "holds no run; give the folder", FileNotFoundError)
    align_classifier(recipe, tmp_path / "a", should_stop=lambda step: True)
    begun = dataclasses.replace(recipe, start=str(tmp_path / "a"))
    fails(finetune_classifier, begun, "has no model/ yet; finish it", FileNotFoundError)
    align_classifier(recipe, tmp_path / "a", resume=True)
    other = change(begun, "model", pooling="first")
    fails(finetune_classifier, other, "aligned a model with pooling mean, not first")
    fails(align_classifier, change(recipe, "train", shard=True), "aligning runs in one process")


def command(words):
    app = App(default_parameter=Parameter(negative=()))
    app.command(align_recipe, name="align")
    app.command(finetune_recipe, name="finetune")
    return app(words.split(), exit_on_error=False, print_error=False, result_action="return_value")


def test_the_commands(reviews, tmp_path, capsys):
    model = "--model.hidden-size 8 --model.intermediate-size 16 --model.mixer-options.num-features 4"
    data = f"--data.source {reviews} --data.tokenizer byte --data.length 16"
    out = tmp_path / "a"
    line = f"align tiny-classifier {data} {model} --align.batch-size 30 --model.mixer-options.features cos2"
    assert command(f"{line} --out {out}") == 0
    said = capsys.readouterr().out
    assert "alignment " in said
    assert f"next: mercer finetune tiny-classifier --from {out}" in said
    tuned = tmp_path / "b"
    assert command(f"finetune tiny-classifier --from {out} --train.batch-size 30 --seed 3 --out {tuned}") == 0
    assert "validation accuracy " in capsys.readouterr().out
    recipe = config.from_dict(yaml.safe_load((tuned / "config.yaml").read_text()), CLASSIFIERS)
    assert (recipe.seed, recipe.model.mixer_options["features"], recipe.data.source) == (3, "cos2", str(reviews))
    assert command(f"{line} --dry-run") == 0
    assert "kind: within_class" in capsys.readouterr().out
    assert [is_classifier(word) for word in ("tiny-classifier", "tiny")] == [True, False]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tiny", "unknown recipe 'tiny'; choose one of text-classifier, tiny-classifier"),
        ("", "which recipe? give one"),
        ("tiny-classifier text", "unexpected argument 'text'"),
        ("tiny-classifier --align.kin signed", "did you mean '--align.kind'?"),
        ("tiny-classifier --align.kind sum", "unknown align.kind 'sum'; choose one of centered, signed, within_class"),
        ("tiny-classifier --align.radius 0", "align.radius (0.0) must be above 0"),
        ("tiny-classifier --model.num-heads 5", "hidden_size (32) must be a multiple of num_heads (5)"),
        ("tiny-classifier --train.steps 5", "unknown option '--train.steps'"),
    ],
)
def test_wrong_words_are_named(words, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        read_classifier(words.split(), None, None)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_recipe_round_trips_through_yaml(name):
    recipe = CLASSIFIERS[name]()
    assert recipe.name == name
    assert config.from_dict(yaml.safe_load(config.write_yaml(recipe)), CLASSIFIERS) == recipe
    assert json.dumps(config.to_dict(recipe))


def test_the_text_classifier_is_the_paper_s():
    recipe = CLASSIFIERS["text-classifier"]()
    model, align, optim = recipe.model, recipe.align, recipe.optim
    sizes = (model.num_layers, model.hidden_size, model.num_heads, model.intermediate_size, recipe.data.length)
    assert sizes == (2, 128, 2, 256, 128)
    assert (model.dropout, model.projections, model.pooling) == (0.1, "value", "mean")
    assert (model.mixer, model.mixer_options) == ("particle", {})  # the mixer's own: softplus, 256 features
    assert (align.step_size, align.inverse_temperature, align.strength, align.exponent) == (2e-3, 50.0, 1e-3, 0.0)
    assert (align.clip, align.radius, align.epochs, align.kind) == (10.0, 1.5, 10, "within_class")
    assert (optim.lr, optim.weight_decay, optim.warmup, optim.min_lr_ratio) == (2e-4, 0.01, 0.1, 0.0)
    assert (recipe.train.epochs, recipe.train.batch_size, align.batch_size) == (10, 64, 64)
