"""The loop: exact resume, equal losses however a step is cut, and an end that says what happened."""

import dataclasses
import io
import json
import signal

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from mercer.errors import CheckpointError
from mercer.evaluate import evaluate
from mercer.hf import load
from mercer.train import checkpoint, loop, setup
from mercer.train.folder import RunFolder
from mercer.train.loop import spaced, train
from mercer.train.record import Run, read_runs


def change(recipe, section, **values):
    return dataclasses.replace(recipe, **{section: dataclasses.replace(getattr(recipe, section), **values)})


def losses(folder):
    return [(row["step"], row["train_loss"], row["valid_loss"]) for row in RunFolder(folder).rows()]


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("mixer", ["softmax", "cubit"])
def test_resume_is_exact(recipe, tmp_path, mixer):
    recipe = change(recipe, "model", mixer=mixer)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = train(recipe, whole)
    first = train(change(recipe, "train", checkpoint_every=0), parts, should_stop=lambda step: step == 3)
    assert (first.status, first.steps, first.valid_loss) == ("interrupted", 3, None)
    assert not (parts / "model").exists()
    resumed = train(recipe, parts, resume=True)
    assert losses(parts) == losses(whole)
    assert (resumed.valid_loss, resumed.loss_by_position) == (run.valid_loss, run.loss_by_position)
    assert [point | {"step": 0} for point in resumed.curve] == [point | {"step": 0} for point in run.curve]
    there, here = weights(whole), weights(parts)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)


def test_the_same_recipe_gives_the_same_numbers(recipe, tmp_path):
    one, two = train(recipe, tmp_path / "1"), train(recipe, tmp_path / "2")
    assert losses(tmp_path / "1") == losses(tmp_path / "2")
    assert one.valid_loss == two.valid_loss
    assert one.run_id == two.run_id
    other = train(dataclasses.replace(recipe, seed=1), tmp_path / "3")
    assert other.valid_loss != one.valid_loss


def test_it_learns_and_the_record_says_so(recipe, tmp_path):
    run = train(change(recipe, "train", steps=40), tmp_path)
    assert run.status == "done"
    assert run.curve[0]["train_loss"] > 5
    assert run.valid_loss < 3.5
    assert run.parameters == sum(t.numel() for t in weights(tmp_path).values())
    assert run.train_tokens == 40 * 4 * 32
    assert run.tokens_per_second > 0
    assert run.peak_memory_bytes > 1e7
    assert run.mixer == "softmax"
    assert run.config["train"]["steps"] == 40
    assert sum(tokens for *_, tokens in run.loss_by_position) > 100
    assert read_runs(tmp_path) == [run]
    assert Run.from_json(run.to_json()) == run
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["num_threads"] == 1


def test_the_saved_model_is_the_evaluated_one(recipe, tmp_path):
    run = train(recipe, tmp_path)
    _, data = setup.load_data(recipe.data, recipe.seed, None)
    found = evaluate(load(tmp_path / "model"), data.validation.sequential(4))
    assert found.loss == pytest.approx(run.valid_loss, rel=1e-6)


def test_directions_are_redrawn_when_their_steps_are_over(recipe, tmp_path):
    omega = []
    for steps in (None, 4):
        options = {"num_features": 8, "redraw_steps": steps}
        out = tmp_path / str(steps)
        train(change(recipe, "model", mixer="performer", mixer_options=options), out)
        omega.append(next(t for n, t in weights(out).items() if n.endswith("omega")))
    assert not torch.equal(*omega)


def test_accumulated_batches_equal_one_batch(recipe, tmp_path):
    train(recipe, tmp_path / "one")
    train(change(recipe, "train", batch_size=1, accumulate=4), tmp_path / "four")
    one = [loss for _, loss, _ in losses(tmp_path / "one")]
    four = [loss for _, loss, _ in losses(tmp_path / "four")]
    assert four == pytest.approx(one, rel=1e-5)


def test_300_steps_in_bf16_stay_finite_and_learn(recipe, tmp_path):
    recipe = change(recipe, "model", mixer="cubit", mixer_options={"ridge": 1e-10})
    run = train(change(recipe, "train", steps=300, precision="bf16", eval_every=0), tmp_path)
    assert run.valid_loss < 2
    assert all(row["gradient_norm"] < 100 for row in RunFolder(tmp_path).rows())
    assert {tensor.dtype for tensor in weights(tmp_path).values()} == {torch.float32}


def test_a_finished_run_is_not_trained_again(recipe, tmp_path, monkeypatch):
    run = train(recipe, tmp_path)
    monkeypatch.setattr(loop, "Session", None)
    assert train(recipe, tmp_path, resume=True) == run


def test_a_folder_is_not_written_into_unasked(recipe, tmp_path):
    train(recipe, tmp_path)
    with pytest.raises(FileExistsError, match="holds a run already; add --resume, --overwrite or another --out"):
        train(recipe, tmp_path)
    with pytest.raises(ValueError, match=r"was started with optim.lr 0.01, not 0.02; give the same settings"):
        train(change(recipe, "optim", lr=0.02), tmp_path, resume=True)
    again = train(change(recipe, "optim", lr=0.02), tmp_path, overwrite=True)
    assert again.config["optim"]["lr"] == 0.02


def test_a_folder_that_is_no_run_is_left_alone(recipe, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="holds something that is no run"):
        train(recipe, tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").exists()


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(recipe, tmp_path):
    wild = change(change(recipe, "optim", lr=1e30, warmup=0.0), "train", checkpoint_every=1)
    with pytest.raises(FloatingPointError, match=r"the loss is (nan|inf) .* at step \d+; the last good") as caught:
        train(wild, tmp_path)
    path, passed_over = checkpoint.newest(tmp_path / "checkpoints")
    assert str(path) in str(caught.value)
    assert "lower --optim.lr" in str(caught.value)
    assert not passed_over
    assert read_runs(tmp_path)[0].status == "failed"


def test_a_full_disk_while_saving(recipe, tmp_path, monkeypatch):
    write, count = checkpoint.save_tensors, []

    def filling(path, tensors):
        count.append(path)
        if len(count) > 4:  # the first checkpoint takes three files
            raise OSError(28, "No space left on device")
        write(path, tensors)

    monkeypatch.setattr(checkpoint, "save_tensors", filling)
    needed = (
        r"cannot save the checkpoint of step 4: No space left on device; the last good checkpoint is .*step-00000002"
    )
    with pytest.raises(OSError, match=needed):
        train(change(recipe, "train", checkpoint_every=2), tmp_path)
    assert checkpoint.newest(tmp_path / "checkpoints") == (tmp_path / "checkpoints" / "step-00000002", [])
    monkeypatch.undo()
    assert train(change(recipe, "train", checkpoint_every=2), tmp_path, resume=True).status == "done"


def test_a_full_disk_while_saving_the_model_keeps_the_checkpoint(recipe, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    with pytest.raises(OSError, match=r"cannot save the model.*No space left.*make room and go on with --resume"):
        train(recipe, tmp_path)
    assert not (tmp_path / "model").exists()
    monkeypatch.undo()
    assert train(recipe, tmp_path, resume=True).status == "done"
    assert losses(tmp_path)[-1][0] == 6


def test_a_damaged_checkpoint_is_passed_over_and_named(recipe, tmp_path):
    recipe = change(recipe, "train", checkpoint_every=1)
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "parts", should_stop=lambda step: step == 4)
    newest = tmp_path / "parts" / "checkpoints" / "step-00000004" / "optimiser.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    said = io.StringIO()
    train(recipe, tmp_path / "parts", resume=True, console=Console(file=said))
    assert "step-00000004 is damaged (optimiser.safetensors has 100 of" in said.getvalue()
    assert "going on from an older one" in said.getvalue()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "results.json"])
@pytest.mark.parametrize("content", [b"\xff\x00\n", b"{\n", b"5\n"])
def test_a_damaged_file_of_the_run_is_named(recipe, tmp_path, name, content):
    train(recipe, tmp_path, should_stop=lambda step: step == 3)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is .*(--overwrite|--resume|run the training again|version)"):
        train(recipe, tmp_path, resume=True)


def test_a_start_that_was_killed_can_be_repeated(recipe, tmp_path):
    (tmp_path / ".config.yaml.partial").write_text("name: ti")
    assert train(recipe, tmp_path).status == "done"


def test_a_checkpoint_of_another_model(recipe, tmp_path):
    train(recipe, tmp_path, should_stop=lambda step: step == 3)
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("intermediate_size: 64", "intermediate_size: 48"))
    with pytest.raises(CheckpointError, match=r"of another model \(.*mlp.* is \(.*64.*\), not \(.*48.*\)\)"):
        train(change(recipe, "model", intermediate_size=48), tmp_path, resume=True)


def test_sigterm_saves_and_stops(recipe, tmp_path, monkeypatch):
    def shown(self, step, *_):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop.Display, "step", shown)
    run = train(recipe, tmp_path)
    assert (run.status, run.steps) == ("interrupted", 2)
    assert checkpoint.newest(tmp_path / "checkpoints")[0].name == "step-00000002"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_text_is_read_stops_at_once(recipe, tmp_path, monkeypatch, number):
    def read(*_):
        signal.raise_signal(number)
        pytest.fail("it went on reading")

    monkeypatch.setattr(loop.setup, "load_data", read)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nothing_is_shown_where_there_is_no_terminal_and_a_line_where_there_is(recipe, tmp_path):
    quiet, terminal = io.StringIO(), io.StringIO()
    train(recipe, tmp_path / "1", console=Console(file=quiet))
    train(recipe, tmp_path / "2", console=Console(file=terminal, force_terminal=True, width=120))
    assert quiet.getvalue() == ""
    assert "softmax seed 0" in terminal.getvalue()
    assert "tokens/s" in terminal.getvalue()


def test_a_wrong_text_leaves_no_folder(recipe, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(RuntimeError, match="empty"):
        train(change(recipe, "data", source=str(tmp_path / "empty.txt")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer": "cubitt"}, "unknown mixer 'cubitt'; choose one of .*did you mean 'cubit'"),
        ({"size": "tinny"}, "unknown size 'tinny'; choose one of .*did you mean 'tiny'"),
        (
            {"mixer": "cubit", "mixer_options": {"foo": 1}},
            "unknown option 'foo' for mixer 'cubit'; it takes gamma, lrr, ridge, .*share",
        ),
        ({"mixer": "cubit", "mixer_options": {"share": 3}}, r"share \(3\) must be true or false"),
        ({"mixer": "cubit", "mixer_options": {"ridge": -1.0}}, r"ridge \(-1.0\) must be positive"),
        ({"mixer_options": {"scale": float("nan")}}, r"scale \(nan\) must be a finite number, or left out"),
        (
            {"mixer": "performer", "mixer_options": {"num_features": 2.5}},
            r"num_features \(2.5\) must be a whole number",
        ),
        (
            {"mixer": "performer", "mixer_options": {"redraw_steps": 2.5}},
            r"redraw_steps \(2.5\) must be a whole number",
        ),
        ({"mixer": "darkformer", "mixer_options": {"rank": 2.5}}, r"rank \(2.5\) must be a whole number"),
        ({"hidden_size": None, "num_heads": 3}, r"hidden_size \(128\) must be a multiple of num_heads \(3\); change"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_written(recipe, tmp_path, changes, message, without_shape_checks):
    with pytest.raises(ValueError, match=message):
        train(change(recipe, "model", **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_spaced_windows_are_even_and_fixed(recipe):
    _, data = setup.load_data(recipe.data, 0, None)
    split = data.validation
    every = list(spaced(split, 2, None))
    assert sum(len(batch.input_ids) for batch in every) == split.num_windows
    some = [batch.input_ids for batch in spaced(split, 2, 6)]
    assert len(some) == 3
    chosen = [i for i, batch in enumerate(every) if any(torch.equal(batch.input_ids, ids) for ids in some)]
    assert chosen == [i * len(every) // 3 for i in range(3)]
