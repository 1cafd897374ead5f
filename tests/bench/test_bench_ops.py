"""The benchmark of operators: what it measures, refuses, prints and writes."""

import io
import json
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from mercer.bench import BENCHES, PHASES, Measurement, OpsBench, Shape, bench_ops, crossover, format_bench, run_ops
from mercer.bench.operators import Operator
from mercer.bench.ops import backward_call, decode_call
from mercer.mixers import MIXERS, build_mixer

SMALL = {"heads": 2, "head_dim": 8, "repeats": 1}


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_every_operator_gives_values_and_gradients_of_all_its_inputs(name):
    shape = Shape(2, 2, 40, 8, torch.float32, "cpu")
    inputs = BENCHES[name].make(shape)
    assert BENCHES[name].call(**inputs).shape == (2, 2, 40, 8)
    gradients = backward_call(BENCHES[name].call, inputs)()
    assert len(gradients) == sum(tensor.requires_grad for tensor in inputs.values())
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_cubit_is_the_papers_operator():
    inputs = BENCHES["cubit"].make(Shape(1, 2, 20, 8, torch.float64, "cpu"))
    q, k, v, r, s = (inputs[name] for name in "qkvrs")
    kernel = (r @ F.normalize(r, dim=-1).mT).masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf)
    u = torch.linalg.solve(kernel.softmax(-1) + 1e-10 * torch.eye(20, dtype=torch.float64), s * v)
    o = F.scaled_dot_product_attention(q, k, u, is_causal=True)
    assert torch.allclose(BENCHES["cubit"].call(**inputs), o, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(name for name, operator in BENCHES.items() if operator.mixer))
def test_decoding_goes_on_from_the_context(name):
    operator = BENCHES[name]
    assert operator.mixer in MIXERS
    call = decode_call(operator.mixer, Shape(1, 2, 24, 8, torch.float32, "cpu"), **operator.options)
    assert call().shape == (1, 2, 1, 8)
    assert torch.equal(call(), call())


def test_sdpa_against_itself():
    record = bench_ops(["softmax"], [512], heads=4, head_dim=64, repeats=5, passes=["forward+backward"])
    (line,) = record.measurements
    assert line.ratio == pytest.approx(1, abs=0.4)
    assert line.peak_bytes == pytest.approx(line.reference_peak_bytes, rel=0.02)
    # the output and three gradients of the size of q, and work space
    assert line.reference_peak_bytes == pytest.approx(4 * 4 * 512 * 64 * 4, rel=0.5)
    assert line.milliseconds > 0


def test_what_is_measured_and_threads_given_back():
    torch.set_num_threads(2)
    record = bench_ops(["softmax", "kernel_solve", "softmax"], [16, 8, 16], **SMALL)
    assert torch.get_num_threads() == 2
    assert record.num_threads == 1
    assert [(line.operator, line.phase, line.length) for line in record.measurements] == [
        (name, phase, length)
        for length in (8, 16)
        for phase in PHASES
        for name in ("softmax", "kernel_solve")
        if (name, phase) != ("kernel_solve", "decode")
    ]


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "near_far"])
def test_operators_in_linear_time_are_what_their_mixers_compute(name):
    inputs = BENCHES[name].make(Shape(1, 2, 90, 8, torch.float64, "cpu"))
    options = BENCHES[name].options
    mixer = build_mixer(BENCHES[name].mixer, num_heads=2, head_dim=8, **options).double()
    assert torch.allclose(BENCHES[name].call(**inputs), mixer(**inputs)[0])


def test_linear_cubit_differentiates_what_its_mixer_learns():
    inputs = BENCHES["linear_cubit"].make(Shape(1, 2, 40, 8, torch.float32, "cpu"))
    assert {"gamma", "log_ridge"} < inputs.keys()


def test_chunk_sizes_are_measured_apart_where_there_are_chunks():
    record = bench_ops(["softmax", "linear"], [8], chunk_sizes=[4, 8, 4], passes=["forward", "decode"], **SMALL)
    labels = [(line.phase, line.label) for line in record.measurements]
    chunks = ["softmax", "linear, chunk 4", "linear, chunk 8"]
    assert labels == [*(("forward", label) for label in chunks), ("decode", "softmax"), ("decode", "linear")]


def busy(milliseconds, seen):
    def call(q, k, v):
        seen.append(milliseconds)
        begin = time.process_time()
        while time.process_time() - begin < milliseconds * 1e-3:
            pass
        return q + k + v

    return call


def test_a_second_comparison_is_made_in_the_same_turns(monkeypatch):
    make, seen = BENCHES["softmax"].make, []
    monkeypatch.setitem(BENCHES, "once", Operator(make, busy(30, seen)))
    monkeypatch.setitem(BENCHES, "twice", Operator(make, busy(60, seen), beside="once"))
    record = bench_ops(["once", "twice"], [8], passes=["forward", "forward+backward"], **SMALL)
    assert [line.beside for line in record.measurements] == ["", "once"] * 2
    assert [line.beside_ratio for line in record.measurements] == [None, pytest.approx(2, rel=0.1)] * 2
    seen.clear()
    bench_ops(["twice"], [8], passes=["forward"], **SMALL | {"repeats": 3})
    assert seen == [60, 30] * 4 + [60]  # a warm-up, three turns, and the peak
    out = io.StringIO()
    Console(file=out, width=80).print(format_bench(replace(record, measurements=record.measurements[1:2])))
    assert f"{record.measurements[1].beside_ratio:.2f}x once " in out.getvalue()


def test_a_second_comparison_while_decoding():
    (line,) = bench_ops(["linear_cubit"], [8], passes=["decode"], **SMALL).measurements
    assert line.beside == "linear"
    assert line.beside_ratio > 0


def test_record_round_trip_and_refusals():
    record = bench_ops(["softmax"], [8], passes=["forward"], **SMALL)
    assert OpsBench.from_json(record.to_json()) == record
    assert json.loads(record.to_json())["versions"]["torch"] == torch.__version__
    for text in ("{", "[]", "{}", '{"schema": 1, "measurements": [{}]}'):
        with pytest.raises(ValueError, match=r"ops.json is not a benchmark record"):
            OpsBench.from_json(text, "ops.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["cubitt"]}, r"unknown operator 'cubitt'.*did you mean 'cubit'"),
        ({"passes": ["backward"]}, r"unknown pass 'backward'"),
        ({"lengths": [64, 0]}, r"length \(0\) must be at least 1"),
        ({"lengths": []}, r"length \(0\) must be at least 1"),
        ({"heads": 0}, r"heads \(0\) must be at least 1"),
        ({"chunk_sizes": [64, 0]}, r"chunk_size \(0\) must be at least 1"),
        ({"repeats": 0}, r"repeats \(0\) must be at least 1"),
    ],
)
def test_wrong_requests_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        bench_ops(**({"names": ["softmax"], "lengths": [8], "passes": ["forward"]} | SMALL | arguments))


def test_crossover():
    assert crossover([1024, 4096], [2.0, 0.5]) == pytest.approx(2048)
    assert crossover([512, 1024], [0.9, 0.5]) == 512
    assert crossover([512, 1024], [0.9, 1.1]) is None
    assert crossover([512, 1024, 2048], [0.5, 2.0, 1.0]) == 2048
    assert crossover([], []) is None


def made_record() -> OpsBench:
    lines = [
        Measurement(name, phase, length, 2.5 * ratio, 2.5, ratio, ratio, ratio, 3 * 2**20, 2**20)
        for phase in PHASES
        for length, by_name in ((1024, {"cubit": 2.0, "linear": 2.0}), (4096, {"cubit": 2.1, "linear": 0.5}))
        for name, ratio in by_name.items()
    ]
    return OpsBench(lines, 1, 8, 64, "float32", "cpu", 1, 5, "a machine", "mercer bench ops", None, "2026", {})


def test_tables_give_ratio_time_memory_and_crossover():
    out = io.StringIO()
    Console(file=out, width=80).print(format_bench(made_record()))
    text = out.getvalue()
    for part in ("forward + backward", "2.10x", "5.25 ms", "3.00 MiB", "not by 4,096", "from 2,048", "a machine"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


def test_run_ops_prints_and_writes(tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=100)
    run_ops(["softmax", "cubit"], [16, 32], **SMALL, out=tmp_path / "new", console=console)
    record = OpsBench.from_json((tmp_path / "new" / "ops.json").read_text(encoding="utf-8"))
    assert len(record.measurements) == 12
    assert (tmp_path / "new" / "ops.png").read_bytes()[:4] == b"\x89PNG"
    assert "T = 32" in out.getvalue()
    run_ops(["kernel_solve"], [16], **SMALL, passes=["decode"], out=tmp_path / "none", console=console)
    assert not (tmp_path / "none" / "ops.png").exists()  # it has no decoding: nothing to draw
