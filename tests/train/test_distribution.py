"""Two processes train as one does, replicated or sharded, and a sharded checkpoint fits any number of them."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mercer.errors import CheckpointError
from mercer.train import config, distribution
from mercer.train.folder import RunFolder
from mercer.train.loop import train


def change(recipe, section, **values):
    return dataclasses.replace(recipe, **{section: dataclasses.replace(getattr(recipe, section), **values)})


def losses(folder):
    return [loss for row in RunFolder(folder).rows() for loss in (row["train_loss"], row["valid_loss"] or 0.0)]


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture
def cubit(recipe):
    return change(recipe, "model", mixer="cubit")


def torchrun(jobs, folder):
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    script = Path(__file__).with_name("distributed_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, file]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_processes_equal_one(cubit, tmp_path, monkeypatch):
    one = train(change(cubit, "train", accumulate=2), tmp_path / "one")
    jobs = []
    for name, shard in (("ddp", False), ("fsdp", True)):
        recipe = change(cubit, "train", shard=shard, accumulate=2)
        jobs.append({"recipe": config.to_dict(recipe), "out": str(tmp_path / name)})
    jobs.append(jobs[1] | {"out": str(tmp_path / "resumed"), "stop": 4})
    torchrun(jobs, tmp_path)
    for name in ("ddp", "fsdp"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
        run = json.loads((tmp_path / name / "results.json").read_text())
        assert run["valid_loss"] == pytest.approx(one.valid_loss, abs=1e-5)
        assert run["parameters"] == one.parameters
        there, here = weights(tmp_path / "one"), weights(tmp_path / name)
        assert there.keys() == here.keys()
        assert max((there[key] - here[key]).abs().max() for key in there) < 1e-4
    # the run that was stopped goes on in this one process
    port = socket.socket()
    port.bind(("127.0.0.1", 0))
    for key, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setenv("MASTER_PORT", str(port.getsockname()[1]))
    port.close()
    wider = change(change(cubit, "train", accumulate=2, shard=True), "model", intermediate_size=96)
    settings = tmp_path / "resumed" / "config.yaml"
    written = settings.read_text()
    settings.write_text(config.write_yaml(wider))
    with pytest.raises(CheckpointError, match="is of another model"):
        train(wider, tmp_path / "resumed", resume=True)
    settings.write_text(written)
    resumed = train(change(cubit, "train", accumulate=2, shard=True), tmp_path / "resumed", resume=True)
    distribution.leave()
    assert resumed.status == "done"
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert torch.isfinite(torch.tensor(resumed.valid_loss))


def test_sharding_needs_processes(recipe, tmp_path):
    with pytest.raises(ValueError, match=r"train.shard \(True\) needs torchrun: torchrun --nproc-per-node N -m"):
        train(change(recipe, "train", shard=True), tmp_path)
