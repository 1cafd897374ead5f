"""The command line: it answers at once, ends in one line, and its exit code says whose fault it was."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mercer import cli
from mercer.cli import main
from mercer.cli import runs as side_by_side
from mercer.cli.finetune import finetune
from mercer.cli.threads import set_threads
from mercer.cli.training import train
from mercer.train import checkpoint, config, loop
from mercer.train.recipe import Recipe
from mercer.train.record import read_runs

NANO = (
    "--model.hidden-size 32 --model.num-layers 2 --model.num-heads 2 --model.intermediate-size 64 --data.length 32 "
    "--data.validation-fraction 0.2 --train.steps 6 --train.batch-size 4 --train.eval-every 0 --optim.lr 0.01"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("cli") / "documents.jsonl"
    texts = (f"The {i} tests say {i * i} times that {i + 1} follows {i}." for i in range(100))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MERCER_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """Return the folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run(f"train tiny --model.mixer cubit --data.source {corpus} {NANO} --out {folder}") == 0
    return folder


def run(line):
    return main(shlex.split(line))


def fails(capsys, line, code):
    """Run a command that must fail with the code and one line, and return the line."""
    capsys.readouterr()
    assert run(line) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def test_help_needs_no_torch_and_is_quick():
    script = "import sys; from mercer.cli import main; main(['--help']); main(['train', '--help']); print(*sys.modules)"
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert time.perf_counter() - begin < 10  # a machine with other work to do; alone it takes 0.3 s
    for command in ("train", "compare", "generate", "list", "eval", "bench", "report"):
        assert command in done.stdout
    loaded = set(done.stdout.split("\n")[-2].split())
    assert not loaded & {"torch", "transformers", "numpy", "datasets", "matplotlib"}


def test_the_number_of_threads_is_checked_wherever_it_is_set():
    with pytest.raises(ValueError, match=r"threads \(0\) must be at least 1"):
        set_threads(0)
    setting = [path.name for path in Path(cli.__file__).parent.glob("*.py") if "set_num_threads(" in path.read_text()]
    assert sorted(setting) == ["runs.py", "threads.py"]  # the former is given what compare has checked


def test_help_names_every_setting():
    for key in config.keys_of(Recipe):
        told = (finetune if key.startswith("tune.") else train).__doc__
        assert f"`{key.replace('_', '-')}" in told.replace("mixer-options.NAME", "mixer-options")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("train tinny", 2, "unknown recipe 'tinny'; choose one of .* (did you mean 'tiny'?)"),
        ("train tiny --model.mixer cubitt", 2, "unknown mixer 'cubitt'; choose one of .* (did you mean 'cubit'?)"),
        ("compare tiny --mixers softmax,cubitt", 2, "unknown mixer 'cubitt'; .*"),
        ("compare tiny --mixers cubit:share", 2, "mixer 'cubit:share': an option is written NAME:OPTION=VALUE.*"),
        (
            "compare tiny --mixers softmax,cubit,softmax",
            2,
            "mixers ('softmax,cubit,softmax') names softmax 2 times; .*",
        ),
        ("compare tiny --mixers ,", 2, "mixers (',') names none; give some, as softmax,cubit"),
        ("compare tiny --mixers softmax,cubit:ridge=abc", 2, "ridge ('abc') must be a finite number"),
        ("compare tiny --mixers softmax,local_linear:ridge=-1.0", 2, "ridge (-1.0) must be positive: .*"),
        ("train tiny --mixers a", 2, "unknown option '--mixers'; did you mean '--model.mixer'?"),
        ("compare tiny --seeds 0", 2, "seeds (0) must be at least 1"),
        (
            "train tiny --model.mixer cubit --model.mixer-options.foo 3",
            2,
            "unknown option 'foo' for mixer 'cubit'; it takes gamma, lrr, ridge, .*",
        ),
        ("train tiny --size tinny", 2, "unknown size 'tinny'; .*"),
        ("train tiny --optim.lrr 3", 2, "unknown option '--optim.lrr'; did you mean '--optim.lr'?"),
        ("train tiny --reusme", 2, "unknown option '--reusme'; did you mean '--resume'?"),
        ("train tiny --train.steps many", 2, "train.steps ('many') must be a whole number"),
        ("train tiny --model.num-heads 3", 2, "hidden_size (128) must be a multiple of num_heads (3); change .*"),
        ("train tiny --data.source no/such/file.txt", 2, ".*no/such/file.txt.*"),
        ("train tiny --data.source nonsense", 2, "unknown corpus 'nonsense'; .*"),
        ("train tiny --config no.yaml", 2, "configuration file no.yaml does not exist"),
        ("train tiny twice", 2, "unexpected argument 'twice'; .*"),
        ("train", 2, "which recipe? give one (mercer list recipes), or --config FILE"),
        ("train tiny --threads 0", 2, "threads (0) must be at least 1"),
        ("compare tiny --mixers softmax,cubit --jobs 2 --threads 0", 2, "threads (0) must be at least 1"),
        ("train tiny --threads two", 2, "Invalid value for --threads: .*"),
        ("train tiny --train.shard true", 2, "train.shard (True) needs torchrun: .*"),
        ("trian tiny", 2, 'Unknown command "trian". Did you mean "train"?.*'),
        ("list everything", 2, 'Invalid value "everything" for KIND.*'),
        ("generate no/such/run", 2, "folder no/such/run does not exist; .*"),
        ("generate . --temperature -1", 2, "temperature (-1.0) must not be negative, .*"),
        ("eval tests", 2, "folder tests holds no model: .*"),
        ("report no/such/folder", 2, "folder no/such/folder does not exist; .*"),
        ("bench ops --lengths 12,x", 2, "lengths ('12,x') must be whole numbers separated by commas, as 1024,2048"),
        ("bench ops cubitt", 2, "unknown operator 'cubitt'; .*"),
    ],
)
def test_what_a_user_wrote_wrongly(capsys, tmp_path, monkeypatch, line, code, said):
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    pattern = ".*".join(re.escape(part) for part in said.split(".*"))
    assert re.fullmatch(f"error: {pattern}\n", fails(capsys, line, code))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (bytes(range(256)) * 20, "not text"),
        (b"short", "too short"),
    ],
)
def test_a_text_that_cannot_be_used(capsys, tmp_path, content, said):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    assert said in fails(capsys, f"train tiny --data.source {file} --out {tmp_path / 'run'}", 1)
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint(capsys, tmp_path, corpus, finished):
    line = f"train tiny --model.mixer cubit --data.source {corpus} {NANO} --out {finished} --resume"
    (finished / "results.json").rename(tmp_path / "results.json")
    weights = finished / "checkpoints" / "step-00000006" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:200])
    said = fails(capsys, line, 1)
    assert "step-00000006 is damaged (model.safetensors has 200 of" in said
    assert "no other is left: train again with --overwrite" in said
    weights.write_bytes(whole)
    (tmp_path / "results.json").rename(finished / "results.json")
    assert run(line) == 0


def test_a_damaged_model(capsys, tmp_path, finished):
    (tmp_path / "model").mkdir()
    for file in (finished / "model").iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes()[:3000])
    for command in ("generate", "eval --source python-docs"):
        assert "damaged" in fails(capsys, f"{command} {tmp_path}", 1)


def test_a_full_disk(capsys, tmp_path, corpus, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    said = fails(capsys, f"train tiny --data.source {corpus} {NANO} --out {tmp_path / 'run'}", 1)
    assert "cannot save the checkpoint of step 6: No space left on device; there is no earlier checkpoint" in said


def test_a_full_disk_anywhere_else(capsys, tmp_path, corpus, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "replace_text", full)
    said = fails(capsys, f"train tiny --data.source {corpus} {NANO} --out {tmp_path / 'run'}", 1)
    assert "No space left on device; make room, then give the same command with --resume" in said


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("MERCER_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown recipe"):
        run("train tinny")


def test_dry_run_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("train cubit-125m --dry-run") == 0
    said = capsys.readouterr().out
    assert re.search(r"parameters +1[0-9]{2},[0-9]{3},[0-9]{3}\n", said)
    for line in ("steps", "training tokens   819,200,000", "FLOPs per token", "FLOPs in all", "memory, about"):
        assert line in said
    assert "lr: 0.0006" in said
    assert not list(tmp_path.iterdir())


def test_list_shows_every_table(capsys):
    assert run("list") == 0
    said = capsys.readouterr().out
    for name in ("demo", "python-docs", "PSF-2.0", "softmax", "cubit", "gamma", "350m"):
        assert name in said
    assert run("list sizes") == 0
    assert "python-docs" not in capsys.readouterr().out


def test_train_says_one_line_and_no_noise(capfd, tmp_path, corpus):
    assert run(f"train tiny --data.source {corpus} {NANO} --out {tmp_path / 'run'} --seed 3") == 0
    said = capfd.readouterr()
    assert said.err == ""
    assert re.fullmatch(r"softmax seed 3  valid loss \d.* tokens/s  .* s  \S*run\n", said.out)


def test_a_run_can_be_repeated_from_its_config(tmp_path, finished):
    assert run(f"train --config {finished / 'config.yaml'} --out {tmp_path / 'again'}") == 0
    assert read_runs(tmp_path / "again")[0].valid_loss == read_runs(finished)[0].valid_loss


def test_generate_is_greedy_at_nought_and_repeats_itself_with_a_seed(capsys, finished):
    texts = []
    for options in ("--temperature 0", "--temperature 0 --seed 5", "--seed 5", "--seed 5", "--seed 6"):
        assert run(f"generate {finished} --prompt 'The 7' --max-new-tokens 12 {options}") == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("The 7") for text in texts)
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert texts[2] != texts[4]


def test_eval_repeats_the_result_of_the_run(capsys, finished):
    assert run(f"eval {finished} --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(read_runs(finished)[0].valid_loss, rel=1e-6)
    assert run(f"eval {finished / 'model'} --source python-docs --length 64 --windows 8") == 0
    assert "loss by position" in capsys.readouterr().out


def test_eval_of_a_bare_model_needs_a_text(capsys, finished):
    assert "give --source" in fails(capsys, f"eval {finished / 'model'}", 2)


def test_compare_trains_each_and_reports(capsys, tmp_path, corpus):
    mixers = "softmax,cubit:share=true"
    line = f"compare tiny --mixers {mixers} --seeds 2 --data.source {corpus} {NANO} --out {tmp_path / 'all'}"
    assert run(line) == 0
    said = capsys.readouterr().out
    names = {"softmax-s0", "softmax-s1", "cubit-share=True-s0", "cubit-share=True-s1"}
    assert {path.parent.name for path in (tmp_path / "all").glob("*/results.json")} == names
    assert (tmp_path / "all" / "report.html").is_file()
    assert (tmp_path / "all" / "table.md").is_file()
    assert "[4/4] cubit seed 1" in said
    before = read_runs(tmp_path / "all")
    assert run(f"{line} --resume") == 0  # nothing is left to do
    assert read_runs(tmp_path / "all") == before
    assert run(f"report {tmp_path / 'all'} --out {tmp_path / 'page'}") == 0
    assert (tmp_path / "page" / "report.html").is_file()


def test_compare_goes_on_when_one_run_diverges(capsys, tmp_path, corpus, monkeypatch):
    gradients = loop.Session._gradients

    def diverging(self):
        return float("nan") if self.recipe.model.mixer == "cubit" else gradients(self)

    monkeypatch.setattr(loop.Session, "_gradients", diverging)
    line = f"compare tiny --mixers cubit,softmax --seeds 1 --data.source {corpus} {NANO} --out {tmp_path / 'all'}"
    said = fails(capsys, line, 1)
    assert "1 of 2 runs failed; the first: the loss is nan" in said
    assert {run.mixer: run.status for run in read_runs(tmp_path / "all")} == {"cubit": "failed", "softmax": "done"}
    assert (tmp_path / "all" / "report.html").is_file()


def test_compare_side_by_side_stops_and_goes_on(capsys, tmp_path, corpus):
    out = tmp_path / "all"
    line = (
        f"compare tiny --mixers softmax,cubit --seeds 2 --jobs 2 --data.source {corpus} {NANO} --train.steps 60 "
        f"--out {out}"
    )
    runs = [out / name for name in ("softmax-s0", "cubit-s0", "softmax-s1", "cubit-s1")]

    def interrupt():
        for folder in runs[:2]:
            wait_for_rows(folder / "metrics.jsonl", 3)
        os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=interrupt)
    stopper.start()
    assert run(line) == 130
    stopper.join()
    assert "To go on:\n" in capsys.readouterr().out
    assert not (runs[3] / "config.yaml").exists()
    assert run(f"{line} --resume") == 0
    assert "[4/4]" in capsys.readouterr().out
    single = tmp_path / "single"
    assert run(f"train tiny --model.mixer cubit --data.source {corpus} {NANO} --train.steps 60 --out {single}") == 0
    by_folder = {folder.name: read_runs(folder)[0] for folder in runs}
    assert {found.status for found in by_folder.values()} == {"done"}
    assert by_folder["cubit-s0"].valid_loss == read_runs(single)[0].valid_loss


def test_side_by_side_stops_before_anything_has_begun(capsys, tmp_path, corpus, monkeypatch):
    begin = side_by_side._Worker.__init__

    def begin_and_interrupt(*arguments):
        begin(*arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(side_by_side._Worker, "__init__", begin_and_interrupt)
    line = f"compare tiny --mixers softmax,cubit --seeds 1 --jobs 2 --data.source {corpus} {NANO} --out {tmp_path}"
    assert run(line) == 130
    told = capsys.readouterr()
    assert told.out.startswith("stopped before the next run began. To go on:\n")
    assert told.err == ""


def test_side_by_side_says_what_went_wrong_in_a_process(capsys, tmp_path, corpus):
    line = f"compare tiny --mixers softmax --seeds 2 --jobs 2 --data.source {corpus} {NANO} --out {tmp_path}"
    (tmp_path / "softmax-s1").mkdir()
    (tmp_path / "softmax-s1" / "thesis.txt").write_text("years of work")
    assert "softmax-s1 holds something that is no run" in fails(capsys, line, 2)


def wait_for_rows(file, count):
    patience = time.monotonic() + 90
    while not (file.exists() and file.read_text().count("\n") >= count):
        assert time.monotonic() < patience
        time.sleep(0.02)


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, corpus):
    out = tmp_path / "run"
    words = shlex.split(f"train tiny --data.source {corpus} {NANO} --train.steps 100 --out {out}")
    command = [sys.executable, "-m", "mercer.cli", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = out / "metrics.jsonl"
    wait_for_rows(metrics, 3)
    process.send_signal(signal.SIGINT)
    said, noise = process.communicate(timeout=60)
    assert process.returncode == 130
    assert noise == ""
    told = said.splitlines()
    assert re.fullmatch(r"stopped after step \d+; a checkpoint is saved. To go on:", told[0])
    again = shlex.split(told[1])
    assert again == ["python", "-m", "mercer.cli", *words, "--resume"]
    assert main(again[3:]) == 0
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 101))
    assert not (Path(out) / ".model.partial").exists()


@pytest.mark.parametrize(("package", "extra"), [("transformers.models", "hf"), ("matplotlib", "plots"), ("x", "all")])
def test_a_missing_package_is_named_with_its_extra(package, extra, monkeypatch, capsys):
    def absent(*_, **__):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("mercer.cli.app", absent)
    assert main(["list"]) == 1
    assert (
        capsys.readouterr().err == f"error: this command needs the package {package}: pip install 'mercer[{extra}]'\n"
    )
