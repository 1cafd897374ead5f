"""Conversion of saved models: exact self-check, files, summary, and everything it refuses."""

import json

import pytest
import torch
from test_hf_families import BIDIRECTIONAL
from tiny_models import DECODERS, build, decoder, llama, tokens
from transformers import AutoModel, AutoModelForCausalLM

import mercer
from mercer.cli import main
from mercer.cli.convert import _print_summary
from mercer.data import build_tokenizer
from mercer.errors import CheckpointError
from mercer.hf import check_exact, convert, find_source
from mercer.hf.source import Source


@pytest.mark.parametrize("family", sorted(DECODERS))
def test_every_family_is_exact_and_left_as_it_was(family, record_property):
    model = decoder(family)
    ids = tokens(1, 7)
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        found = check_exact(model, length=24)
        record_property("difference", found.difference)
        print(f"{family}: {found}")
        assert found.difference <= 1e-5
        assert found.padded_difference <= 1e-5
        assert torch.equal(model(ids, use_cache=False).logits, before)
    assert not hasattr(model.config, "mercer")


@pytest.mark.parametrize("family", sorted(BIDIRECTIONAL))
def test_bidirectional_models_are_exact(family):
    class_name, arguments = BIDIRECTIONAL[family]
    found = check_exact(build(class_name, **arguments), length=24)
    assert found.difference <= 1e-5
    assert (found.padded_difference is None) == (family == "vit")


def test_low_precision_weights_are_checked_in_float32_and_kept():
    model = llama().to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert check_exact(model, length=12).difference <= 1e-5
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_check_that_fails_says_by_how_much(monkeypatch):
    from mercer.mixers import MIXERS, Mixer

    class Off(MIXERS["softmax"]):
        def forward(self, q, k, v, **others):
            return super().forward(q, k, 1.01 * v, **others)

    assert issubclass(Off, Mixer)
    monkeypatch.setitem(MIXERS, "softmax", Off)
    with pytest.raises(CheckpointError, match=r"exact mode differs from the original by .* above 1e-05, so its"):
        check_exact(llama(), length=12)


@pytest.fixture
def saved(tmp_path):
    """Save a tiny Llama with a tokenizer; returns its folder."""
    tokenizer = build_tokenizer("byte")
    model = llama(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    return tmp_path / "original"


@pytest.mark.parametrize("mixer", ["softmax", "darkformer", "cubit"])
def test_a_converted_folder_loads_bit_equal(saved, tmp_path, mixer):
    found = convert(saved, mixer, out=tmp_path / "converted")
    ids = tokens(2, 9)
    with torch.no_grad():
        logits = found.model(ids).logits
        assert torch.equal(mercer.load(tmp_path / "converted")(ids).logits, logits)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
        assert torch.equal(loaded.eval()(ids).logits, logits)
        original = AutoModelForCausalLM.from_pretrained(saved).eval()(ids).logits
    assert ((logits - original).abs().max() <= 1e-5) == (mixer == "softmax")
    for name, tensor in original_state(saved).items():
        assert torch.equal(found.model.state_dict()[name], tensor)


def original_state(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_the_command_line_checks_converts_evaluates_and_generates(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MERCER_CACHE_DIR", str(tmp_path / "cache"))
    out, text = tmp_path / "converted", tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"The {i} tests say {i * i}." * 4}) + "\n" for i in range(60)))
    assert main(["convert", str(saved), "--mixer", "darkformer:num_features=16", "--check", "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "exact mode differs from the original by" in said
    assert "model.layers.{0-1}.self_attn" in said
    assert {file.name for file in out.iterdir()} >= {"README.md", "model.safetensors", "tokenizer.json", "config.json"}
    assert json.loads((out / "config.json").read_text())["mercer"]["options"] == {"num_features": 16}
    assert "token mixer `darkformer` (num_features=16)" in (out / "README.md").read_text()
    assert not list(tmp_path.glob(".*partial"))

    assert main(["eval", str(out), "--source", str(text), "--length", "32", "--windows", "2"]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main(["generate", str(out), "--prompt", "The", "--max-new-tokens", "4", "--temperature", "0"]) == 0


def test_an_original_is_evaluated_like_itself_with_softmax_mixers(saved, tmp_path, capsys, monkeypatch):
    """Windows hold several documents, which must not see each other in either."""
    monkeypatch.setenv("MERCER_CACHE_DIR", str(tmp_path / "cache"))
    text, found = tmp_path / "text.jsonl", []
    text.write_text("".join(json.dumps({"text": f"The {i} tests."}) + "\n" for i in range(60)))
    convert(saved, "softmax", out=tmp_path / "softmax")
    for folder in (saved, tmp_path / "softmax"):
        capsys.readouterr()
        assert main(["eval", str(folder), "--source", str(text), "--length", "48", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["loss"])
        assert main(["generate", str(folder), "--prompt", "The", "--max-new-tokens", "2", "--temperature", "0"]) == 0
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_sliding_layers_stay_and_are_listed(tmp_path, capsys):
    decoder("gemma3").save_pretrained(tmp_path / "gemma")
    found = convert(tmp_path / "gemma", "performer", layers="global", check=True, num_features=16)
    assert found.summary.converted == ("model.layers.1.self_attn",)
    assert found.tokenizer is None
    _print_summary(found.summary)
    assert "as it was: sliding attention of 4" in capsys.readouterr().out


def test_only_the_layers_asked_for(saved):
    assert convert(saved, layers=[1]).summary.converted == ("model.layers.1.self_attn",)
    assert convert(saved, layers="0").summary.left == (("model.layers.1.self_attn", "not asked for"),)


@pytest.mark.parametrize("family", sorted(BIDIRECTIONAL))
def test_bidirectional_models_convert_too(family, tmp_path):
    class_name, arguments = BIDIRECTIONAL[family]
    build(class_name, **arguments).save_pretrained(tmp_path / "original")
    (tmp_path / "original" / "preprocessor_config.json").write_text("{}")
    found = convert(tmp_path / "original", "darkformer", check=True, out=tmp_path / "converted", num_features=16)
    assert type(found.model).__name__ == f"Mercer{class_name}"
    assert (tmp_path / "converted" / "preprocessor_config.json").exists()
    assert "Darkformer" in str(AutoModel.from_pretrained(tmp_path / "converted"))


def test_a_name_means_a_folder_a_file_or_the_hub(saved, tmp_path):
    assert find_source("owner/name") == Source("owner/name")
    assert find_source(saved) == Source(str(saved))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.gguf").touch()
    expected = Source(str(tmp_path / "one"), "model.gguf")
    assert find_source(tmp_path / "one") == find_source(tmp_path / "one" / "model.gguf") == expected
    assert expected.arguments == {"gguf_file": "model.gguf"}
    (tmp_path / "one" / "other.gguf").touch()
    with pytest.raises(FileNotFoundError, match="holds no model: 2 GGUF files, name one of them"):
        find_source(tmp_path / "one")


def refused(capsys, line, code):
    capsys.readouterr()
    assert main([str(word) for word in line]) == code
    return capsys.readouterr().err


def test_refusals_in_words(saved, tmp_path, capsys):
    out = ["-o", tmp_path / "out"]
    cases = [
        (["no/such/folder", *out], "error: no/such/folder does not exist; give a folder, a GGUF file or a hub name"),
        ([tmp_path, *out], "holds no model: no config.json and no GGUF file"),
        ([saved / "config.json", *out], "is a file, but no GGUF file"),
        (["owner/nothing-there", *out], "cannot read the configuration of owner/nothing-there"),
        ([saved, "-o", saved], "exists and is not empty; give another --out"),
        ([saved, "--mixer", "darkformr", *out], "unknown mixer 'darkformr'"),
        ([saved, "--mixer", "darkformer:rank=99", *out], "rank (99) must be between 1 and head_dim (8)"),
        ([saved, "--layers", "7", *out], "layers names 7, but the attention layers are [0, 1]"),
        ([saved, "--check", "--drop-softcap", *out], "check and drop_softcap exclude each other"),
        ([saved], "--out"),
    ]
    for line, words in cases:
        said = refused(capsys, ["convert", *line], 2)
        assert words in said
        assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_models_that_have_no_kernel_form_are_refused(saved, tmp_path, capsys):
    decoder("gemma2", attn_logit_softcapping=30.0).save_pretrained(tmp_path / "capped")
    said = refused(capsys, ["convert", tmp_path / "capped", "--check", "-o", tmp_path / "out"], 2)
    assert "caps its attention logits at 30.0" in said
    assert main(["convert", str(tmp_path / "capped"), "--drop-softcap", "-o", str(tmp_path / "out")]) == 0
    convert(saved, "performer", out=tmp_path / "once")
    said = refused(capsys, ["convert", tmp_path / "once", "-o", tmp_path / "twice"], 2)
    assert "carries mixers already (performer); convert the model it was made from" in said
    all_sliding = decoder("gemma3", layer_types=["sliding_attention"] * 2)
    all_sliding.save_pretrained(tmp_path / "sliding")
    said = refused(capsys, ["convert", tmp_path / "sliding", "-o", tmp_path / "out2"], 2)
    assert "no attention layer of Gemma3ForCausalLM can carry a mixer" in said


def test_damaged_weights_are_named(saved, tmp_path, capsys):
    (saved / "model.safetensors").write_bytes(b"no tensors")
    said = refused(capsys, ["convert", saved, "-o", tmp_path / "out"], 1)
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    (saved / "model.safetensors").unlink()
    said = refused(capsys, ["convert", saved, "-o", tmp_path / "out"], 2)
    assert "model.safetensors" in said
