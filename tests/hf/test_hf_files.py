"""Saving, loading, Auto classes before and after either import, remote code, damaged files."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build, clone, decoder, llama, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mercer.errors import CheckpointError
from mercer.hf import attach, detach, generated, load
from mercer.hf.install import attached

ROOT = Path(__file__).parents[2]


def fresh_process(code, **environment):
    """Run code in a new interpreter and return what it printed."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model, with its input and its logits beside it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved") / "model"
    model = attach(llama(), "cubit", layers="1")
    ids = tokens(2, 6)
    model.save_pretrained(folder)
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(ids).logits}, folder / "expected")
    return folder


EQUAL = """
    from safetensors.torch import load_file
    expected = load_file(r"{folder}/expected")
    equal = torch.equal(model(expected["ids"]).logits, expected["logits"])
    print(type(model).__module__, type(model).__name__, equal)
"""


def test_loading_after_mercer_alone_was_imported(folder):
    code = """
        import sys, mercer, torch
        assert not any(name.split(".")[0] == "transformers" for name in sys.modules)
        from transformers import AutoModelForCausalLM
        torch.set_grad_enabled(False); torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(r"{folder}")
    """
    out = fresh_process(textwrap.dedent(code).format(folder=folder) + textwrap.dedent(EQUAL).format(folder=folder))
    assert out == ["mercer.hf.classes", "MercerLlamaForCausalLM", "True"]


def test_loading_when_transformers_was_imported_first(folder):
    code = """
        import torch
        from transformers import AutoModelForCausalLM
        import mercer
        torch.set_grad_enabled(False); torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(r"{folder}")
    """
    out = fresh_process(textwrap.dedent(code).format(folder=folder) + textwrap.dedent(EQUAL).format(folder=folder))
    assert out == ["mercer.hf.classes", "MercerLlamaForCausalLM", "True"]


def test_loading_as_remote_code_without_importing_mercer(folder, tmp_path):
    code = """
        import sys, torch
        from transformers import AutoModelForCausalLM
        assert not any(name.split(".")[0] == "mercer" for name in sys.modules)
        torch.set_grad_enabled(False); torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(r"{folder}", trust_remote_code=True)
        model.save_pretrained(r"{again}")
        import os
        print(*sorted(name for name in os.listdir(r"{again}") if name.endswith(".py")))
    """
    again = tmp_path / "again"
    code = textwrap.dedent(code).format(folder=folder, again=again) + textwrap.dedent(EQUAL).format(folder=folder)
    out = fresh_process(code, HF_HOME=str(tmp_path))
    assert out == ["modeling_mercer.py", "mercer.hf.classes", "MercerLlamaForCausalLM", "True"]
    assert json.loads((again / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


@torch.no_grad()
def test_load_is_bit_equal_and_in_evaluation_mode(folder):
    expected = load_file(folder / "expected")
    model = load(folder)
    assert not model.training
    assert torch.equal(model(expected["ids"]).logits, expected["logits"])
    assert model.mercer_summary().converted == ("model.layers.1.self_attn",)
    assert load(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert not hasattr(model.config, "auto_map")
    assert type(detach(model)).__name__ == "LlamaForCausalLM"


@torch.no_grad()
def test_auto_classes_find_every_head(folder, tmp_path):
    assert type(AutoConfig.from_pretrained(folder)).__name__ == "MercerLlamaConfig"
    body = AutoModel.from_pretrained(folder)
    assert type(body).__name__ == "MercerLlamaModel"
    assert len(list(attached(body))) == 1
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    bert = build("BertForSequenceClassification", **sizes, num_attention_heads=4, num_labels=3)
    ids = tokens(2, 5)
    attach(bert, "softmax").save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(ids).logits, bert(ids).logits)


@pytest.mark.parametrize("family", ["gemma2", "gemma4", "gpt2", "opt", "phi3"])
@torch.no_grad()
def test_other_families_reload_bit_equal(family, tmp_path):
    model, ids = attach(decoder(family), "deltaformer"), tokens(2, 7)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert torch.equal(again(ids).logits, model(ids).logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mercer"]["mixer"] == "deltaformer"
    assert config["auto_map"]["AutoModelForCausalLM"] == f"modeling_mercer.{type(model).__name__}"


@torch.no_grad()
def test_vit_reloads_bit_equal(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = attach(build("ViTForImageClassification", **sizes, image_size=16, patch_size=4), "softmax")
    pixels = torch.randn(2, 3, 16, 16)
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(pixels).logits, model(pixels).logits)


def test_generated_classes_pickle_and_pretrain_from_a_configuration():
    config_class, model_class = generated("LlamaForCausalLM")
    assert generated(model_class) == (config_class, model_class)
    assert pickle.loads(pickle.dumps(model_class)) is model_class
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = config_class(**sizes, num_attention_heads=4, mercer={"mixer": "cubit"})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert type(model) is model_class
    assert len(list(attached(model))) == 2
    spread = [module.mixer.r_proj.weight.std().item() for _, module in attached(model)]
    assert all(0.01 < value < 0.03 for value in spread)  # the initializer_range of the model, not PyTorch's own
    for flag in ("_supports_attention_backend", "supports_context_parallel", "_can_compile_fullgraph"):
        assert getattr(model, flag) is False
    with pytest.raises(ValueError, match="has no model class 'LlamaForEverything'"):
        generated("LlamaForEverything")


@pytest.mark.parametrize("mixer", ["cubit", "random"])
def test_tensors_a_checkpoint_lacks_get_their_start_values(mixer, tmp_path):
    model = attach(llama(), mixer)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    own = {f"{name}.mixer.{key}" for name, module in attached(model) for key in module.mixer.initial_values()}
    assert own <= tensors.keys()
    save_file({k: v for k, v in tensors.items() if k not in own}, tmp_path / "model.safetensors", {"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, module), (_, before) in zip(attached(again), attached(model), strict=True):
        for key, value in module.mixer.initial_values().items():
            assert torch.equal(getattr(module.mixer, key), value), (name, key)
            assert torch.equal(getattr(module.mixer, key), getattr(before.mixer, key))
    with pytest.raises(CheckpointError, match=rf"lacks {len(own)} tensors of MercerLlamaForCausalLM, among them"):
        load(tmp_path)


def test_layers_draw_apart_and_reproducibly():
    first, second = (dict(attached(attach(llama(), "random", seed=seed))) for seed in (0, 1))
    draws = [module.mixer.initial_values() for group in (first, second) for module in group.values()]
    for key in draws[0]:
        values = [draw[key] for draw in draws]
        assert not any(torch.equal(values[i], values[j]) for i in range(4) for j in range(i))
    again = dict(attached(attach(llama(), "random", seed=0)))
    for name, module in first.items():
        for key, value in module.mixer.state_dict().items():
            assert torch.equal(again[name].mixer.state_dict()[key], value)


def test_damaged_folders(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no config.json; give the folder that save_pretrained wrote"):
        load(tmp_path / "nothing")
    llama().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="holds LlamaForCausalLM without a mixer; load it with transformers"):
        load(tmp_path / "plain")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is damaged"):
        load(broken)
    (broken / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"holds no model.safetensors; the save was interrupted"):
        load(broken)
    weights = (folder / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match=r"the weights in .* are damaged"):
        load(broken)


@torch.no_grad()
def test_a_detached_model_saves_as_what_it_was(tmp_path):
    model, ids = llama(), tokens(1, 5)
    reference = clone(model)
    detach(attach(model, "cubit")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "mercer" not in (tmp_path / "config.json").read_text()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, reference(ids).logits)
