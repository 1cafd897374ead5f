"""A checkpoint is whole or not there, and what is damaged is said in one line."""

import json
import os
import subprocess
import sys

import pytest
import torch

from mercer.errors import CheckpointError
from mercer.train import checkpoint
from mercer.train.checkpoint import Position


def write(folder, step, **options):
    tensors = {"model": {"w": torch.full((3,), float(step))}}
    return checkpoint.save(folder, Position(step=step, batches=2 * step, seconds=0.1), tensors, **options)


def test_round_trip_keeps_every_bit(tmp_path):
    torch.manual_seed(1)
    w, h = torch.randn(5, 7), torch.randn(3).to(torch.bfloat16)
    path = checkpoint.save(tmp_path, Position(step=4, batches=8, seconds=1 / 3), {"a": {"w": w}, "b": {"h": h.t()}})
    position, files = checkpoint.load(path)
    assert position == Position(step=4, batches=8, seconds=1 / 3)
    assert torch.equal(files["a"]["w"], w)
    assert torch.equal(files["b"]["h"], h)


def test_newest_is_found_and_old_ones_go(tmp_path):
    for step in (5, 10, 100):
        write(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]
    assert checkpoint.newest(tmp_path) == (tmp_path / "step-00000100", [])


def test_no_checkpoint_is_no_error(tmp_path):
    assert checkpoint.newest(tmp_path / "none") == (None, [])


def cut(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def flip(path):
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def lose_weights(path):
    (path / "model.safetensors").unlink()


def lose_manifest(path):
    (path / "manifest.json").unlink()


def spoil_manifest(path):
    (path / "manifest.json").write_text("{")


def replace_manifest(path):
    lose_manifest(path)
    (path / "manifest.json").mkdir()


def another_structure(path):
    (path / "manifest.json").write_text(json.dumps({"schema": 1, "files": {"model.safetensors": 3}}))


def another_schema(path):
    (path / "manifest.json").write_text(json.dumps({"schema": 99, "files": {}}))


DAMAGE = {
    cut: r"model.safetensors has \d+ of \d+ bytes",
    flip: "the content of model.safetensors has changed",
    lose_weights: "model.safetensors has 0 of",
    lose_manifest: "manifest.json is missing or cannot be read",
    spoil_manifest: "manifest.json is missing or cannot be read",
    replace_manifest: "manifest.json is missing or cannot be read",
    another_structure: "manifest.json is missing or cannot be read",
    another_schema: "schema 99, this version reads 1",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_passed_over(tmp_path, damage):
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    damage(newer)
    with pytest.raises(CheckpointError, match=DAMAGE[damage]) as caught:
        checkpoint.load(newer)
    assert "delete it and resume from an older one" in str(caught.value)
    assert "\n" not in str(caught.value)
    path, passed_over = checkpoint.newest(tmp_path)
    assert path == older
    assert passed_over == [str(caught.value)]


def test_nothing_but_damaged_ones_is_an_error(tmp_path):
    cut(write(tmp_path, 1))
    with pytest.raises(CheckpointError, match="no other is left: train again with --overwrite"):
        checkpoint.newest(tmp_path)


def test_full_disk_leaves_the_last_one_and_no_litter(tmp_path, monkeypatch):
    good = write(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    with pytest.raises(OSError, match="No space left on device"):
        write(tmp_path, 2)
    assert checkpoint.newest(tmp_path) == (good, [])
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


REFUSED = """
import resource, signal, sys, torch
from pathlib import Path
from mercer.train.checkpoint import Position, save
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # the kernel refuses the rest, as a full disk does
try:
    save(Path(sys.argv[1]), Position(step=2), {"model": {"w": torch.ones(10_000)}})
except OSError as error:
    print("refused:", error)
"""


def test_a_write_the_kernel_refuses_is_an_os_error(tmp_path):
    good = write(tmp_path, 1)
    done = subprocess.run([sys.executable, "-c", REFUSED, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("refused: File too large")
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from mercer.train import checkpoint
write, count = checkpoint.save_tensors, 0
def killed(path, tensors):
    global count
    count += 1
    if count == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, tensors)
checkpoint.save_tensors = killed
tensors = {"w": torch.ones(3)}
checkpoint.save(Path(sys.argv[1]), checkpoint.Position(step=2), {"model": tensors, "optimiser": tensors})
"""


def test_a_process_killed_while_saving(tmp_path):
    good = write(tmp_path, 1)
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert done.returncode == -9
    assert (tmp_path / ".step-00000002.partial").is_dir()
    assert checkpoint.newest(tmp_path) == (good, [])
    newer = write(tmp_path, 2)  # the next save clears up
    assert sorted(path.name for path in tmp_path.iterdir()) == [good.name, newer.name]


def test_replace_text_keeps_the_old_text_when_it_fails(tmp_path, monkeypatch):
    file = tmp_path / "results.json"
    checkpoint.replace_text(file, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.replace_text(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
