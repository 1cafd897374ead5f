"""Tasks of lm-evaluation-harness on a tiny model: the figures are those of its logits, by hand; no network."""

import json

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

import mercer
from mercer.cli import main
from mercer.data import build_tokenizer
from mercer.errors import DataError
from mercer.evaluate.harness import evaluate_tasks, harness_model

TOKENIZER = build_tokenizer("byte")
QUESTIONS = [
    {"question": f"{'ab' * n} and then", "choices": choices, "answer": n % 3}
    for n, choices in enumerate(
        [["yes", "no, not", "it"], ["a", "bcdef", "gh"], ["one", "two", "three four"], ["x", "yz", "w"]]
    )
]


@pytest.fixture(scope="module", params=["softmax", "darkformer"])
def model(request):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,  # so that answers differ
        bos_token_id=TOKENIZER.bos_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    options = {"num_features": 16} if request.param == "darkformer" else {}
    return mercer.attach(LlamaForCausalLM(config).eval(), request.param, **options)


def write_task(folder, name, rows, **settings):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "metadata": {"version": 1.0},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(described | settings))
    return str(path)


@pytest.fixture
def choices(tmp_path):
    return write_task(
        tmp_path,
        "choices",
        QUESTIONS,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        doc_to_choice="{{choices}}",
        metric_list=[{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
    )


def score_by_hand(model, context, continuation):
    """Sum the log-probabilities of the bytes of a continuation after bos and the context."""
    ids = torch.tensor([[TOKENIZER.bos_token_id, *(context + continuation).encode()]])
    with torch.no_grad():
        logp = model(ids).logits[0].log_softmax(-1)
    start = 1 + len(context.encode())
    return sum(logp[t - 1, ids[0, t]].item() for t in range(start, ids.shape[1]))


def answers_by_hand(model, *, per_character=False):
    scores = [
        [score_by_hand(model, q["question"], f" {c}") / (len(c) if per_character else 1) for c in q["choices"]]
        for q in QUESTIONS
    ]
    return [max(range(3), key=row.__getitem__) for row in scores]


def test_accuracy_is_that_of_the_logits(model, choices):
    found = {score.metric: score for score in evaluate_tasks(model, TOKENIZER, [choices])}
    right = [a == q["answer"] for a, q in zip(answers_by_hand(model), QUESTIONS, strict=True)]
    by_length = [a == q["answer"] for a, q in zip(answers_by_hand(model, per_character=True), QUESTIONS, strict=True)]
    assert found["acc"].value == sum(right) / 4
    assert found["acc_norm"].value == sum(by_length) / 4
    assert found["acc"].num_examples == 4
    assert found["acc"].shots == 0
    share = found["acc"].value
    assert found["acc"].error == pytest.approx((share * (1 - share) / 3) ** 0.5)


def request(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_loglikelihoods_are_those_of_the_logits_whatever_is_beside_them(model, batch_size):
    lm = harness_model(model, TOKENIZER, batch_size=batch_size)
    asked = [("a longer context by far", " x"), ("short", " and a long answer"), ("", "nothing before"), ("b", "c")]
    found = lm.loglikelihood([request("loglikelihood", *pair) for pair in asked], disable_tqdm=True)
    by_hand = [score_by_hand(model, *pair) for pair in asked]
    assert [value for value, _ in found] == pytest.approx(by_hand, abs=1e-4)
    whole = lm.loglikelihood_rolling([request("loglikelihood_rolling", "a whole text")], disable_tqdm=True)
    assert whole == pytest.approx([score_by_hand(model, "", "a whole text")], abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_generation_is_greedy_and_independent_of_padding(model, batch_size):
    lm = harness_model(model, TOKENIZER, batch_size=batch_size)
    contexts = ["a longer context by far", "ab", "to be"]
    options = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False}
    found = lm.generate_until([request("generate_until", c, dict(options)) for c in contexts], disable_tqdm=True)
    for context, text in zip(contexts, found, strict=True):
        ids = [TOKENIZER.bos_token_id, *context.encode()]
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == TOKENIZER.eos_token_id:
                break
        assert text == TOKENIZER.decode(ids[1 + len(context) :], skip_special_tokens=True).split("\n\n")[0]


@pytest.mark.parametrize("model", ["darkformer"], indirect=True)
def test_the_command_measures_a_saved_model(model, choices, tmp_path, capsys):
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    assert main(["eval", str(folder), "--tasks", choices, "--limit", "3", "--shots", "1", "--json"]) == 0
    found = {score["metric"]: score for score in json.loads(capsys.readouterr().out.splitlines()[-1])}
    assert found.keys() == {"acc", "acc_norm"}
    assert (found["acc"]["shots"], found["acc"]["num_examples"]) == (1, 3)
    assert main(["eval", str(folder), "--tasks", choices, "--source", "python-docs"]) == 2
    assert capsys.readouterr().err == "error: --source is for texts, and --tasks measures tasks\n"
    assert main(["eval", str(folder), "--shots", "1"]) == 2
    assert capsys.readouterr().err == "error: --shots is for tasks; name some with --tasks\n"
    assert main(["eval", str(folder), "--tasks", "absent.yaml"]) == 2
    assert "no such task file" in capsys.readouterr().err


def test_what_cannot_be_measured_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no tasks; name some"):
        evaluate_tasks(None, TOKENIZER, [])
    with pytest.raises(ValueError, match=r"limit \(0\) must be at least 1"):
        evaluate_tasks(None, TOKENIZER, ["a.yaml"], limit=0)
    with pytest.raises(FileNotFoundError, match=r"no such task file: .*absent.yaml; give a path that exists"):
        evaluate_tasks(None, TOKENIZER, ["absent.yaml"])
    (tmp_path / "empty.yaml").write_text("nothing: here\n")
    with pytest.raises(ValueError, match=r"empty.yaml is no task file: it names no task; begin it with"):
        evaluate_tasks(None, TOKENIZER, [str(tmp_path / "empty.yaml")])
    path = write_task(tmp_path, "lost", QUESTIONS, output_type="multiple_choice", doc_to_text="{{question}}")
    (tmp_path / "lost.jsonl").unlink()
    with pytest.raises(DataError, match=r"the data of task .*lost.yaml cannot be read: .*; check the network"):
        evaluate_tasks(None, TOKENIZER, [path])
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"needs the package 'lm_eval'; pip install \"mercer\[eval\]\""):
        evaluate_tasks(None, TOKENIZER, [path])
