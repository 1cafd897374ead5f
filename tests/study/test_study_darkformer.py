"""The DARKFormer study on a tiny pretrained model: every method runs, the figures are those of the trials."""

import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mercer.cli import main
from mercer.data import build_tokenizer
from mercer.study.darkformer.design import LOOKS, METHODS, Settings, conditions
from mercer.study.darkformer.trial import trial


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return the folder of a tiny Llama over bytes, and a text."""
    folder = tmp_path_factory.mktemp("darkformer")
    tokenizer = build_tokenizer("byte", [], None)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"The {i} tests say {i * i}. " * 9}) + "\n" for i in range(60)))
    return folder / "model", file


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MERCER_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def settings(pretrained, **changes):
    model, text = map(str, pretrained)
    small = {
        "steps": 4,
        "length": 64,
        "num_features": 16,
        "align_steps": 2,
        "distances": (30, 50),
        "questions": 2,
        "keep": (0,),
    }
    return Settings(model, source=text, **small | changes)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_finetuned_and_measured(pretrained, method):
    chosen = settings(pretrained, methods=(method,), parts=("methods",))
    (condition,) = conditions(chosen)
    found = trial(seed=1, **condition)
    assert all(math.isfinite(value) for value in found.values())
    assert {f"{name}@{step}" for name in ("loss", "accuracy") for step in range(5)} < set(found)
    assert {"recall@30", "recall@50"} < set(found)
    assert ("error" in found) == METHODS[method].align
    assert trial(seed=1, **condition) == found
    assert set(LOOKS) == set(METHODS)


def test_a_hybrid_keeps_the_softmax_of_its_layers(pretrained):
    near = {"parts": ("methods",), "length": 128}
    part, whole, exact = (
        trial(seed=0, **conditions(settings(pretrained, methods=(name,), **near))[0])["loss@0"]
        for name in ("window, hybrid, taught", "window, taught", "softmax")
    )
    assert len({part, whole, exact}) == 3
    every = settings(pretrained, methods=("window, hybrid, taught",), keep=(0, 1), **near)
    with pytest.raises(ValueError, match="to be kept"):
        trial(seed=0, **conditions(every)[0])


def test_softmax_starts_where_the_original_is(pretrained):
    base, near = (conditions(settings(pretrained, methods=(m,), parts=("methods",)))[0] for m in ("softmax", "window"))
    exact = trial(seed=0, **base)
    assert exact["loss@4"] < exact["loss@0"]
    assert trial(seed=0, **near)["loss@0"] == pytest.approx(exact["loss@0"], abs=1e-5)  # 64 tokens: all are near


def test_conditions_are_unique_and_begin_with_the_methods():
    found = conditions(Settings("model", keep=(1,)))
    assert len({json.dumps(c, sort_keys=True) for c in found}) == len(found)
    assert [c["method"] for c in found[: len(METHODS)]] == list(METHODS)
    assert {c["learning_rate"] for c in found} == set(Settings("model").rates)
    plain = {c["method"] for c in conditions(Settings("model"))}
    assert plain == {name for name, method in METHODS.items() if not method.hybrid}


def test_the_command_writes_a_page(pretrained, tmp_path, capsys):
    model, text = map(str, pretrained)
    words = ["study", "darkformer", model, "--source", text, "--steps", "4", "--length", "64", "--num-features", "16"]
    words += ["--align-steps", "2", "--distances", "30", "--methods", "softmax;darkformer;darkformer, near, taught"]
    words += ["--features", "16,32", "--rates", "1e-4,1e-2", "--out", str(tmp_path / "study")]
    assert main(words) == 0
    said = capsys.readouterr().out
    for part in ("After finetuning", "Full finetuning by learning rate", "by number of features", "Aligned"):
        assert part in said
    page = (tmp_path / "study" / "report.html").read_text()
    assert "darkformer, near, taught" in page
    assert len((tmp_path / "study" / "trials.jsonl").read_text().splitlines()) == 3 + 3 + 1 + 1
    assert main(["study", "darkformer", model, "--steps", "5"]) == 2
    assert "steps (5) must be a multiple of looks (4)" in capsys.readouterr().err
    assert main(["study", "darkformer", model, "--methods", "window, hybrid, taught"]) == 2
    assert "keeps the softmax of some layers; say of which with keep" in capsys.readouterr().err
    every = ";".join(METHODS)
    assert main(["study", "darkformer", model, "--methods", every]) == 2  # none is dropped in silence
    assert "'darkformer, hybrid, taught' keeps the softmax of some layers" in capsys.readouterr().err
    assert main(["study", "darkformer", model, "--keep", "0,9", "--out", str(tmp_path / "keep")]) == 2
    assert "keep names 9, but the attention layers are [0, 1]" in capsys.readouterr().err
    assert main(["study", "darkformer", model, "--layers", "7", "--out", str(tmp_path / "layers")]) == 2
    assert "layers names 7, but the attention layers are [0, 1]" in capsys.readouterr().err
    assert main(["study", "darkformer", model, "--threads", "0", "--out", str(tmp_path / "none")]) == 2
    assert "threads (0) must be at least 1" in capsys.readouterr().err
    assert main(["study", "darkformer", model, "--methods", "softmaxx"]) == 2
    assert "unknown method 'softmaxx'" in capsys.readouterr().err
