"""The benchmark of other packages: its plumbing, with a peer made here."""

import contextlib
import importlib
import io
import itertools
import json
import os
import time

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from mercer.bench import PEERS, Peer, bench_peers, run_peers
from mercer.bench.peers import ALLOCATORS, OURS, PASSES

SMALL = {"heads": 2, "head_dim": 8, "repeats": 1, "apart": False}


class Slow(nn.Module):
    """SDPA after so many rounds of waste; it learns a scale and notes what it was given."""

    def __init__(self, rounds, seen):
        super().__init__()
        self.rounds, self.seen = rounds, seen
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q, k, v):
        self.seen.append((self.rounds, q.detach(), torch.is_grad_enabled()))
        begin = time.process_time()
        while time.process_time() - begin < self.rounds * 1e-3:
            pass
        return F.scaled_dot_product_attention(self.scale * q, k, v, is_causal=True)


def slow_peer(seen, *rounds):
    return Peer(lambda heads, head_dim, length: {f"{n} rounds": (m, m) for n in rounds for m in [Slow(n, seen)]})


def test_the_default_and_the_fastest_path_are_measured_beside_each_of_ours():
    seen = []
    torch.set_num_threads(2)
    record = bench_peers([32], **SMALL, peers={"slow": slow_peer(seen, 60, 20, 40)})
    assert torch.get_num_threads() == 2
    lines = record.measurements
    assert [(line.allocator, line.phase, line.path, line.default, line.mixer) for line in lines] == [
        (allocator, phase, path, path == "60 rounds", mixer)
        for phase in PASSES
        for allocator in ("default", "steady")
        for path in ("60 rounds", "20 rounds")
        for mixer in OURS
    ]
    assert all(line.milliseconds > 20 for line in lines)
    assert all(line.ratio == pytest.approx(line.milliseconds / line.our_milliseconds) for line in lines)
    assert [rounds for rounds, _, _ in seen].count(40) == 2 * 2 * len(PASSES)  # warmed up and tried, and no more
    assert all(torch.equal(q, seen[0][1]) for _, q, _ in seen)
    assert {gradients for _, _, gradients in seen} == {False, True}


def test_the_allocator_is_left_alone_or_steady(monkeypatch):
    found, steady = [], []

    @contextlib.contextmanager
    def watched():
        steady.append(True)
        yield
        steady.clear()

    def paths(heads, head_dim, length):
        module = nn.Linear(1, 1)
        return {"one": (module, lambda q, k, v: found.append(bool(steady)) or q * module.weight)}

    monkeypatch.setitem(ALLOCATORS, "steady", watched)
    bench_peers([8], **SMALL, passes=["forward"], allocators=["steady", "default"], peers={"one": Peer(paths)})
    assert [kind for kind, _ in itertools.groupby(found)] == [True, False]


def of_this_process(heads, head_dim, length):
    module = Slow(0, [])
    return {f"process {os.getpid()}": (module, module)}


def test_every_measurement_has_a_process_of_its_own():
    sizes, peers = SMALL | {"apart": True}, {"one": Peer(of_this_process)}
    lines = bench_peers([8], **sizes, allocators=["default"], peers=peers).measurements
    assert [(line.phase, line.mixer) for line in lines] == [(phase, mixer) for phase in PASSES for mixer in OURS]
    assert len({line.path for line in lines} | {f"process {os.getpid()}"}) == 3


def test_peaks_are_of_the_pass():
    (forward, _), (backward, _) = (
        bench_peers([64], **SMALL, passes=[phase], allocators=["steady"], peers={"one": slow_peer([], 0)}).measurements
        for phase in PASSES
    )
    assert 0 < forward.peak_bytes < backward.peak_bytes
    assert 0 < forward.our_peak_bytes < backward.our_peak_bytes


def test_what_is_printed_and_written(tmp_path):
    out = io.StringIO()
    peers = {"fast": slow_peer([], 0), "slow": slow_peer([], 30)}
    run_peers([16, 24], **SMALL, passes=["forward"], peers=peers, out=tmp_path, console=Console(file=out, width=100))
    text = out.getvalue()
    for part in (
        "forward, T = 16, default allocator",
        "forward, T = 24, steady allocator",
        "/ darkformer",
        "(by itself: 30 rounds)",
        "/ performer",
        "1 thread",
    ):
        assert part in text
    record = json.loads((tmp_path / "peers.json").read_text())
    assert [line["peer"] for line in record["measurements"]] == ["fast", "fast", "slow", "slow"] * 4
    assert record["num_features"] == 256


def test_wrong_requests_are_refused_by_name():
    with pytest.raises(ValueError, match=r"unknown pass 'decode'; choose one of forward, forward.backward"):
        bench_peers([8], passes=["decode"], peers={})
    with pytest.raises(ValueError, match=r"length \(0\) must be at least 1"):
        bench_peers([8, 0], peers={})


@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_missing_package_is_said_with_its_extra(name, monkeypatch, capsys, tmp_path):
    from mercer.cli import main

    missing = name.replace("-", "_")

    def refuse(module):
        if module.split(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return importlib.import_module(module)

    monkeypatch.setattr("mercer.bench.peers.import_module", refuse)
    monkeypatch.setattr("mercer.bench.peers.PEERS", {name: PEERS[name]})
    assert main(["bench", "peers", "--lengths", "8", "--out", str(tmp_path / "bench")]) == 1
    assert f"this command needs the package {missing}: pip install 'mercer[peers]'" in capsys.readouterr().err
    assert not (tmp_path / "bench").exists()
