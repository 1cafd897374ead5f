"""What a layer's softmax is worth: nothing for one that looks nowhere, much for one that the model lives on."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import mercer
from mercer.cli import main
from mercer.data import build_tokenizer
from mercer.evaluate.layer_costs import LayerCosts, Standing, layer_costs
from mercer.evaluate.recall import questions
from mercer.hf.layers import kept_numbers

FILLER = list(b"It was a bright cold day, and nothing at all happened for a very long time. " * 8)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("byte", [], None)


@pytest.fixture
def model(tokenizer):
    """A model of three layers, the first of which has its attention cut off."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    for parameter in model.parameters():
        parameter.data *= 5.0
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    return model


class Batch:
    def __init__(self, ids):
        self.input_ids = self.labels = torch.tensor([ids])
        self.position_ids, self.num_bytes = torch.arange(len(ids))[None], len(ids)


def test_costs_are_differences_and_the_model_is_left_as_it_was(model, tokenizer):
    asked, text = list(questions(tokenizer, FILLER, 60, trials=2)), Batch(FILLER[:100])
    before = model(text.input_ids).logits
    heard = []
    found = layer_costs(model, [text], asked, watch=lambda *seen: heard.append(seen), window=4, sinks=1)
    assert torch.equal(model(text.input_ids).logits, before)
    assert heard == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert found.loss(0) == pytest.approx(0, abs=1e-6)
    assert found.recall(0) == pytest.approx(0, abs=1e-6)
    assert found.alone[1] != found.original
    losses = mercer.attach(model, "window", layers=[2], window=4, sinks=1)(text.input_ids, labels=text.labels).loss
    assert found.alone[2].loss == pytest.approx(losses.item(), rel=1e-5)
    mercer.detach(model)
    exact = layer_costs(model, [text], mixer="softmax")
    assert [exact.loss(layer) for layer in range(3)] == pytest.approx([0, 0, 0], abs=1e-6)
    assert exact.original.recall is None
    assert exact.recall(1) == 0


def test_the_dearest_layers():
    at = lambda loss, recall=None: Standing(loss, recall, None)
    found = LayerCosts(at(1.0), {3: at(1.5), 5: at(1.1), 7: at(0.9), 9: at(1.4)})
    assert found.shares() == {3: 0.5, 5: 0.1, 7: 0.0, 9: 0.4}
    assert found.dearest(2) == [3, 9]
    assert LayerCosts(at(1.0), {0: at(1.0)}).shares() == {0: 0.0}


def test_a_model_that_fails_is_left_as_it_was(model):
    with pytest.raises(ValueError, match="widow"):
        layer_costs(model, [Batch(FILLER[:20])], mixer="window", widow=3)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_layers_that_are_kept(model):
    mixed = mercer.attach(model, "window", keep=[1], window=4)
    assert mixed.mercer_summary().converted == ("model.layers.0.self_attn", "model.layers.2.self_attn")
    assert mixed.mercer_summary().left == (("model.layers.1.self_attn", "to be kept"),)
    assert mixed.config.mercer["layers"] == [0, 2]
    mercer.detach(mixed)
    with pytest.raises(ValueError, match=r"keep names 7, but the attention layers are \[0, 1, 2\]"):
        mercer.attach(model, "window", keep=[7])
    with pytest.raises(ValueError, match=r"keep \('12'\) must be layer numbers, as \[18, 20\]"):
        kept_numbers("12")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: to be kept"):
        mercer.attach(model, "window", keep=[0, 1, 2])
    with pytest.raises(ValueError, match=r"layer 1 .* cannot carry a mixer: to be kept"):
        mercer.attach(model, "window", layers="1,2", keep=[1])


def test_the_command_names_what_to_keep(model, tokenizer, tmp_path, capsys):
    folder, text = tmp_path / "model", tmp_path / "text.jsonl"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text.write_text("".join('{"text": "%s"}\n' % (bytes(FILLER).decode() + str(i)) for i in range(12)))
    settings = ["--source", str(text), "--length", "64", "--windows", "2", "--recall", "60", "--trials", "2"]
    assert main(["layers", str(folder), *settings, "--keep", "1", "--mixer", "window:window=4"]) == 0
    said = capsys.readouterr().out
    assert "recalled over 60 tokens" in said
    (command,) = [line for line in said.splitlines() if line.startswith("mercer convert")]
    kept = int(command.split("--keep ")[1].split()[0])
    assert kept in (1, 2)
    assert main([*command.split()[1:-1], str(tmp_path / "hybrid")]) == 0
    assert "as it was: to be kept" in capsys.readouterr().out
    assert mercer.load(tmp_path / "hybrid").config.mercer["layers"] == sorted({0, 1, 2} - {kept})
    capsys.readouterr()
    assert main(["layers", str(folder), *settings, "--keep", "9", "--mixer", "window:window=4"]) == 0
    assert "2 of 3 layers account for" in capsys.readouterr().out  # with all three kept, nothing is converted
    assert main(["layers", str(folder), *settings, "--keep", "0"]) == 2
    assert main(["convert", str(folder), "--keep", "x", "-o", str(tmp_path / "no")]) == 2


def test_models_and_texts_that_cannot_be_measured(tokenizer, tmp_path, capsys):
    text, size = tmp_path / "text.jsonl", len(tokenizer)
    text.write_text("".join('{"text": "%s"}\n' % (bytes(FILLER).decode() + str(i)) for i in range(12)))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    bert = BertForMaskedLM(BertConfig(vocab_size=size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    for name, model in (("gpt2", gpt2), ("bert", bert)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)

    def said(command, name, *settings):
        where = ["--source", str(text)] if command != "generate" else ["--prompt", "It"]
        assert main([command, str(tmp_path / name), *where, *settings]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    short = ["--length", "32", "--windows", "1"]
    for command in ("layers", "eval", "generate"):
        assert "BertForMaskedLM does not predict the next token" in said(command, "bert")
    for command in ("layers", "eval"):
        assert "has 64 positions, and a text has 65 tokens; give a smaller --length" in said(
            command, "gpt2", "--length", "65"
        )
        assert "--recall" in said(command, "gpt2", *short, "--recall", "60")
    assert "a smaller --max-new-tokens" in said("generate", "gpt2", "--max-new-tokens", "99")
    assert main(["layers", str(tmp_path / "gpt2"), "--source", str(text), *short, "--recall", "0"]) == 0
    assert "no other layer can be converted" in capsys.readouterr().out
