"""Attention transfer: it lowers the held-out error, touches nothing else, and refuses in words."""

import copy
import json
import math
import signal
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mercer
from mercer.cli import main
from mercer.data import build_tokenizer
from mercer.hf.install import attached
from mercer.train.align import align, measure
from mercer.train.keeping import Keeper

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**arguments):
    """Return a random Llama whose attention is far from uniform."""
    model = LlamaForCausalLM(LlamaConfig(**{"vocab_size": 64, **SIZES, "num_key_value_heads": 2, **arguments})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    return model


def text(index):
    return torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(index))


HELDOUT = [text(1000), text(1001)]


@pytest.mark.parametrize("mixer", ["darkformer", "lfk"])
def test_every_layer_gets_better_and_nothing_else_changes(mixer):
    model = mercer.attach(llama(), mixer, num_features=16)
    frozen = {name: p.clone() for name, p in model.named_parameters() if ".mixer." not in name}
    losses = []
    found = align(model, text, HELDOUT, steps=25, report=lambda step, loss: losses.append(loss))
    for old, new in zip(found.before.layers, found.after.layers, strict=True):
        assert new.error < old.error
    assert found.kept == ()
    assert sum(losses[-5:]) < sum(losses[:5])
    assert found.tokens == 25 * 80
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    assert all(p.requires_grad for p in model.parameters())
    assert all(p.grad is None for name, p in model.named_parameters() if name in frozen)
    again = measure(model, HELDOUT)
    assert [row.error for row in again] == pytest.approx([row.error for row in found.after])


def test_the_lesson_is_the_original_model_layer_by_layer():
    original = llama()
    model = mercer.attach(llama(), "lfk", num_features=16)
    model.load_state_dict(original.state_dict(), strict=False)
    softmax = mercer.attach(original, "softmax")
    seen = {}
    with torch.no_grad():
        for name, layer in attached(softmax):
            layer.mixer.register_forward_pre_hook(lambda m, args, name=name: seen.update({name: args}))
        softmax(HELDOUT[0])
    table = measure(model, HELDOUT[:1])
    for (name, layer), row in zip(attached(model), table, strict=True):
        q, k, v = seen[name]
        exact = mercer.ops.softmax_attention(q, k, v)
        heard, wanted = (layer.o_proj(o.transpose(1, 2).flatten(2)) for o in (layer.mixer(q, k, v)[0], exact))
        expected = (heard - wanted).square().sum() / wanted.square().sum()
        assert row.error == pytest.approx(expected.item(), rel=1e-3)


def test_a_layer_that_gets_worse_keeps_what_it_had():
    model = mercer.attach(llama(), "darkformer", num_features=16)
    align(model, text, HELDOUT, steps=15)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = align(model, lambda index: text(5)[:1, :4], HELDOUT, steps=4, learning_rate=5.0)
    assert found.kept == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert found.after == found.before


def test_every_layer_takes_the_best_rival_and_the_choice_is_saved(tmp_path):
    torch.manual_seed(3)
    model = mercer.attach(llama(), "darkformer", num_features=16, window=4, sinks=1)
    mercer.calibrate(model, HELDOUT, mode="center")
    kinds = [("lfk", {"separate": True, "num_features": 64}), ("window", {})]
    found = align(model, text, HELDOUT, rivals=kinds, steps=15, first=6)
    assert set(found.exchanged) | set(found.kept) <= {name for name, _ in attached(model)}
    assert "lfk:separate=True:num_features=64" in found.exchanged.values()  # four times the features
    for old, new in zip(found.before.layers, found.after.layers, strict=True):
        assert new.error <= old.error
    for name, layer in attached(model):
        if found.exchanged.get(name, "").startswith("lfk"):
            assert (layer.mixer.window, layer.mixer.sinks, layer.mixer.center) == (4, 1, True)
            assert not torch.equal(layer.mixer.key_features.omega, layer.mixer.features.omega)
            assert layer.mixer.key_center.abs().sum() > 0
    model.save_pretrained(tmp_path / "saved")
    again = mercer.load(tmp_path / "saved")
    assert torch.equal(again(HELDOUT[0]).logits, model(HELDOUT[0]).logits)
    assert "lfk" in str(again.mercer_summary())
    once_more = align(again, text, HELDOUT, steps=2, first=6)
    assert [row.error for row in once_more.before] == pytest.approx([row.error for row in found.after])


def test_refusals():
    with pytest.raises(ValueError, match="Performer has no parameters to align; convert to darkformer or lfk"):
        align(mercer.attach(llama(), "performer", num_features=16), text, HELDOUT)
    with pytest.raises(ValueError, match="LlamaForCausalLM carries no mixer"):
        align(llama(), text, HELDOUT)
    with pytest.raises(ValueError, match=r"steps \(0\) must be at least 1"):
        align(mercer.attach(llama(), "lfk"), text, HELDOUT, steps=0)
    model = mercer.attach(llama(), "lfk", num_features=16)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.fill_(math.inf)
    with pytest.raises(
        FloatingPointError, match=r"layers\.1\.self_attn: softmax attention on its q, k, v is not finite"
    ):
        align(model, text, HELDOUT, steps=1)


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """Convert a tiny model in a folder; returns it and a text."""
    monkeypatch.setenv("MERCER_CACHE_DIR", str(tmp_path / "cache"))
    tokenizer = build_tokenizer("byte")
    llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"The {i} tests say {i * i}." * 4}) + "\n" for i in range(60)))
    spec = "darkformer:num_features=16:window=8:sinks=2"
    assert main(["convert", str(tmp_path / "original"), "--mixer", spec, "-o", str(tmp_path / "converted")]) == 0
    return tmp_path / "converted", file


def test_the_command_line_aligns_measures_and_evaluates(converted, tmp_path, capsys):
    folder, file = (str(path) for path in converted)
    settings = ["--source", file, "--length", "48", "--windows", "4"]
    assert main(["align", folder, *settings, "--steps", "12", "--batch-size", "2", "--out", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert main(["align", folder, *settings, "--rivals", "lfk:separat=true"]) == 2
    assert "separat" in capsys.readouterr().err
    for words in ("step 12 of 12", "window 8+2", "plain average", "before", "after"):
        assert words in said
    aligned = mercer.load(tmp_path / "a")
    assert aligned.config.mercer["options"]["center"] is True
    assert (tmp_path / "a" / "tokenizer.json").exists()
    start = mercer.load(folder).state_dict()
    changed = {
        name for name, tensor in aligned.state_dict().items() if not torch.equal(tensor, start.get(name, tensor))
    }
    assert changed
    assert all(".mixer." in name for name in changed)

    assert main(["align", str(tmp_path / "a"), *settings, "--steps", "2", "--calibrate", "none"]) == 0
    assert main(["kernel-error", str(tmp_path / "a"), *settings, "--first", "10"]) == 0
    assert "window 8+2" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "a"), *settings, "--recall", "30,45"]) == 0
    said = capsys.readouterr().out
    assert "asked for after so many tokens" in said
    assert "% of 20" in said
    assert not list(tmp_path.glob(".a*"))
    assert main(["align", folder, *settings, "--out", str(tmp_path / "a")]) == 2
    assert "exists; give another --out" in capsys.readouterr().err


def test_an_alignment_goes_on_where_it_was_stopped(tmp_path):
    def begin():
        return mercer.attach(llama(), "darkformer", num_features=16, seed=3)

    def run(model, keeper=None, stop=None):
        done = []
        return align(
            model, text, HELDOUT, steps=6, rivals=[("lfk", {"separate": True})], keeper=keeper,
            report=lambda step, loss: done.append(step), should_stop=lambda: done[-1] == stop,
        )  # fmt: skip

    model = begin()
    start = copy.deepcopy(model.state_dict())
    whole = run(model)
    again = begin()
    again.load_state_dict(start)
    settings = {"steps": 6}
    with pytest.raises(KeyboardInterrupt):
        run(again, Keeper(tmp_path / "kept", settings), stop=4)
    with pytest.raises(FileExistsError, match="go on with --resume, or begin anew with --overwrite"):
        Keeper(tmp_path / "kept", settings)
    with pytest.raises(ValueError, match=r"steps \(9\) was 6 when this training began"):
        Keeper(tmp_path / "kept", {"steps": 9}, resume=True)
    once_more = begin()
    once_more.load_state_dict(start)
    resumed = run(once_more, Keeper(tmp_path / "kept", settings, resume=True))
    assert resumed.tokens == whole.tokens
    assert resumed.exchanged == whole.exchanged
    for name, tensor in once_more.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    Keeper(tmp_path / "kept", {"steps": 9}, overwrite=True)
    assert not (tmp_path / "kept").exists()


def test_a_stopped_command_says_how_to_go_on(converted, capsys, monkeypatch):
    folder, file = (str(path) for path in converted)
    words = ["align", folder, "--source", file, "--length", "48", "--steps", "5"]
    monkeypatch.setattr(sys, "argv", ["mercer", *words])
    take_step = torch.optim.Adam.step

    def interrupted(self, *arguments):
        signal.raise_signal(signal.SIGINT)
        torch.optim.Adam.step = take_step
        return take_step(self, *arguments)

    monkeypatch.setattr(torch.optim.Adam, "step", interrupted)
    assert main(words) == 130
    assert f"stopped; go on with: mercer {' '.join(words)} --resume" in capsys.readouterr().out
    before = (converted[0] / "model.safetensors").read_bytes()
    assert main(words) == 2
    assert "go on with --resume, or begin anew with --overwrite" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    said = capsys.readouterr().out
    assert "step 1 of 5" not in said
    assert "step 5 of 5" in said
    assert before != (converted[0] / "model.safetensors").read_bytes()
    assert not (converted[0] / ".align").exists()
