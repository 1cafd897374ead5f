"""Finetuning a converted model: only the chosen part learns, from the text or from the model's own softmax."""

import copy
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import mercer
from mercer.cli import main
from mercer.data import build_tokenizer
from mercer.evaluate.perplexity import token_losses
from mercer.train.record import read_run
from mercer.train.tuning import divergences, free, losses, merge, teacher_of

NEAR = {"num_features": 16, "window": 4, "sinks": 1}


def llama(vocab_size=64):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, num_key_value_heads=2, **sizes)).eval()
    for name, parameter in model.named_parameters():
        if "self_attn" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.25)
    return model


def gpt2():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4))
    return model.eval()


@pytest.fixture
def converted(tmp_path):
    """Return the folder of a converted Llama over bytes."""
    tokenizer = build_tokenizer("byte", [], None)
    mercer.attach(llama(len(tokenizer)), "darkformer", **NEAR).save_pretrained(tmp_path / "converted")
    tokenizer.save_pretrained(tmp_path / "converted")
    return tmp_path / "converted"


def finetune(folder, corpus, *words, out="tuned"):
    out = folder.with_name(out)
    settings = ["--data.length", "32", "--train.batch-size", "4", "--train.eval-every", "0", "--optim.lr", "1e-3"]
    code = main(["finetune", str(folder), "--source", str(corpus), "--out", str(out), *settings, *words])
    return code, out


def weights(folder):
    return load_file(folder / "model.safetensors")


def changed(before, after):
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def kinds(names):
    """Return the last parts of the names of parameters: q_proj, metric, ..."""
    return {name.removesuffix(".weight").split(".")[-1] for name in names}


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("mixers", {"metric"}),
        ("attention", {"metric", "q_proj", "k_proj", "v_proj"}),
        ("lora", {"metric", "q_proj", "k_proj", "v_proj"}),
    ],
)
def test_only_the_chosen_part_learns(converted, corpus, part, expected, capsys):
    code, out = finetune(converted, corpus, "--parameters", part, "--steps", "3")
    assert code == 0
    assert kinds(changed(weights(converted), weights(out / "model"))) == expected
    model = mercer.load(out / "model")
    assert model.config.mercer["mixer"] == "darkformer"
    assert "perplexity  original" in capsys.readouterr().out


def test_all_learns_all(converted, corpus):
    _, out = finetune(converted, corpus, "--parameters", "all", "--steps", "2")
    learned = changed(weights(converted), weights(out / "model"))
    assert {"o_proj", "embed_tokens", "up_proj", "metric", "norm"} <= kinds(learned)
    assert not any(name.endswith("omega") for name in learned)


def test_fused_projections_are_found_and_the_one_after_the_mixer_is_not():
    model = mercer.attach(gpt2(), "darkformer", num_features=16)
    free(model, "attention")
    learning = {name.partition("attn.")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {"c_attn.weight", "c_attn.bias", "mixer.features.metric"}


@pytest.mark.parametrize("family", [llama, gpt2])
def test_low_rank_updates_merge_into_the_same_function(family):
    model = mercer.attach(family(), "darkformer", num_features=16)
    names = [name for name, _ in model.named_parameters()]
    ids = torch.randint(64, (2, 12))
    before = model(ids).logits
    free(model, "lora", rank=3)
    torch.testing.assert_close(model(ids).logits, before)  # they start at zero
    learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name or ".mixer." in name for name, _ in learning)
    for _, parameter in learning:
        parameter.data += 0.05 * torch.randn_like(parameter)
    adapted = model(ids).logits
    assert (adapted - before).abs().max() > 1e-3
    merge(model)
    torch.testing.assert_close(model(ids).logits, adapted, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in model.named_parameters()] == names
    assert not hasattr(model, "peft_config")


def test_the_teacher_is_the_model_with_its_softmax():
    plain = llama()
    ids = torch.randint(64, (2, 20))
    expected = plain(ids).logits
    model = mercer.attach(copy.deepcopy(plain), "window", window=3, sinks=1)
    teacher = teacher_of(model)
    assert torch.equal(teacher(ids).logits, expected)
    assert not torch.allclose(model(ids).logits, expected)
    assert not any(p.requires_grad for p in teacher.parameters())


def test_the_divergence_by_hand_and_where_nothing_is_predicted():
    logits, teacher = torch.tensor([[[0.0, 0.0]] * 3]), torch.tensor([[[math.log(3.0), 0.0]] * 3])
    labels = torch.tensor([[0, 1, -100]])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    torch.testing.assert_close(divergences(logits, teacher, labels), torch.tensor([[expected, 0.0]]))
    both = losses(logits, teacher, labels, 0.25)
    torch.testing.assert_close(both, 0.25 * torch.tensor([[expected, 0.0]]) + 0.75 * token_losses(logits, labels))
    torch.testing.assert_close(losses(logits, None, labels, 0.0), token_losses(logits, labels))


def test_following_the_teacher_brings_the_window_nearer_to_it(converted, corpus):
    code, out = finetune(converted, corpus, "--steps", "30", "--tune.mixer-lr-factor", "10")
    assert code == 0
    run = read_run(out / "results.json")
    losses = [row["train_loss"] for row in run.curve]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert run.measures["perplexity_original"] > 1
    assert run.mixer == "darkformer"


def test_the_mixers_step_further_by_the_factor(converted, corpus):
    """The first step of Adam is as long as its learning rate, whatever the gradient."""
    _, out = finetune(converted, corpus, "--steps", "1", "--tune.mixer-lr-factor", "7", "--optim.warmup", "0")
    before, after = weights(converted), weights(out / "model")
    moved = {name: (after[name] - before[name]).abs().max().item() for name in changed(before, after)}
    metric = max(value for name, value in moved.items() if name.endswith("metric"))
    assert metric == pytest.approx(7e-3, rel=0.01)
    assert max(value for name, value in moved.items() if "proj" in name) == pytest.approx(1e-3, rel=0.01)


def test_the_run_can_be_evaluated_and_continued(converted, corpus, capsys):
    _, out = finetune(converted, corpus, "--steps", "1")
    assert main(["eval", str(out), "--recall", "30"]) == 0
    assert "% of 20" in capsys.readouterr().out
    assert main(["generate", str(out), "--prompt", "The", "--max-new-tokens", "3"]) == 0
    assert finetune(out, corpus, "--steps", "1", out="again")[0] == 0


@pytest.mark.parametrize("part", ["attention", "lora"])
def test_resuming_gives_the_same_weights(converted, corpus, part):
    words = ("--parameters", part, "--train.checkpoint-every", "2")
    _, whole = finetune(converted, corpus, *words, "--steps", "4", out="whole")
    half, last = sorted((whole / "checkpoints").glob("step-*"))
    assert half.name.endswith("2")
    shutil.rmtree(last)
    expected = weights(whole / "model")
    (whole / "results.json").unlink()
    code, _ = finetune(converted, corpus, *words, "--steps", "4", "--resume", out="whole")
    assert code == 0
    assert not changed(expected, weights(whole / "model"))


def test_wrong_use_is_refused_in_words(converted, corpus, tmp_path, capsys):
    def words_of(*words):
        assert finetune(converted, corpus, *words)[0] == 2
        return capsys.readouterr().err

    assert "tune.teacher (1.5) is a share of the loss" in words_of("--tune.teacher", "1.5")
    assert "parameters" in words_of("--parameters", "heads")
    assert "unknown option '--tune.ranks'; did you mean '--tune.rank'?" in words_of("--tune.ranks", "3")
    assert "model, data.tokenizer and tune.folder are those of" in words_of("--model.mixer", "cubit")
    assert "optim.lr (null) has no default" in words_of("--optim.lr", "null")
    assert "sharded updates cannot be merged" in words_of("--parameters", "lora", "--train.shard", "true")
    llama().save_pretrained(tmp_path / "plain")
    assert finetune(tmp_path / "plain", corpus)[0] == 2
    assert "holds a model without a mixer; convert it first" in capsys.readouterr().err
    assert main(["train", "finetune"]) == 2
    assert "tune.folder is not set; give the converted model: mercer finetune DIR" in capsys.readouterr().err
    model = mercer.attach(llama(), "window", window=3, sinks=1)
    with pytest.raises(ValueError, match="have none that learn; use attention or all"):
        free(model, "mixers")
