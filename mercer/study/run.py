"""Run the trials of a study: in parallel, within a budget, each written down as it ends."""

import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from mercer.study.results import Trial, append, name_of, read_trials
from mercer.train.interrupt import Interruption
from mercer.train.record import resume_line

FEW = 3  # seeds: fewer have no standard error worth the name
Key = tuple[str, int]  # of a trial: the name of its condition, and its seed


@dataclass(frozen=True)
class Study:
    """A trial, `trial(seed=seed, **condition)`, under every condition with every seed; most important conditions first.

    `packages` are distributions whose versions belong into the record, beside python, torch and mercer.
    """

    name: str
    trial: Callable[..., dict[str, Any]]
    conditions: Sequence[dict[str, Any]]
    seeds: Sequence[int]
    packages: Sequence[str] = ()

    @cached_property
    def named(self) -> dict[str, dict[str, Any]]:
        """Return the conditions by name, each once."""
        return {name_of(condition): condition for condition in self.conditions}


@dataclass(frozen=True)
class Done:
    """A study that has been run: its trials, a sentence on what the budget left out ("" for nothing), its record."""

    study: Study
    out: Path
    trials: list[Trial]
    left_out: str
    starts: list[dict[str, Any]]  # one for each time the study was started: environment, command, versions, seeds


def run_study(
    study: Study,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    budget_minutes: float | int | None = None,
    jobs: int = 1,
    threads: int | None = None,
    console: Console | None = None,
) -> Done:
    """Run what is missing of a study and return all of it.

    Args:
        study: the study.
        out: its folder: trials.jsonl, a line for each finished trial, and study.json, the record.
        resume: go on with the trials in the folder.
        overwrite: forget the trials in the folder.
        budget_minutes: time for the whole study, trials of earlier starts included. A third of it goes to the first
            seed, conditions that do not fit are left out, then as many seeds are run as fit.
        jobs: trials at a time, each in a process of its own; 1 runs them in this process.
        threads: CPU threads of each process; an equal share of the processors by default.
        console: where progress is shown.

    Raises:
        ValueError: budget, jobs or threads are not positive.
        FileExistsError: the folder holds trials and neither resume nor overwrite is given.
        KeyboardInterrupt: Ctrl-C; the command to go on has been printed.
        RuntimeError: a process died.
    """
    out, console = Path(out), console or Console(stderr=True)
    if budget_minutes is not None and not budget_minutes > 0:
        raise ValueError(f"budget ({budget_minutes}) must be a positive number of minutes, or left out")
    if jobs < 1:
        raise ValueError(f"jobs ({jobs}) must be at least 1")
    if threads is not None and threads < 1:
        raise ValueError(f"threads ({threads}) must be at least 1")
    file = out / "trials.jsonl"
    if overwrite:
        file.unlink(missing_ok=True)
        (out / "study.json").unlink(missing_ok=True)
    elif file.exists() and not resume:
        raise FileExistsError(f"{out} holds a study; go on with --resume, start anew with --overwrite, or set --out")
    done = {t.key: t for t in read_trials(file) if t.key[0] in study.named and t.seed in study.seeds}
    out.mkdir(parents=True, exist_ok=True)
    starts = _record(study, out / "study.json")
    budget = math.inf if budget_minutes is None else 60 * budget_minutes
    begun = time.monotonic()
    with Interruption(at_once=True), console.status("starting") as status:
        try:
            with _workers(study, jobs, threads) as submit:
                for trial in _finish(study, done, budget, jobs, submit):
                    append(file, trial)
                    done[trial.key] = trial
                    line = _progress(plan(study, done, budget, jobs), done, jobs, time.monotonic() - begun)
                    status.update(line)
                    if not console.is_terminal and len(done) % len(study.named) == 0:
                        console.print(line, soft_wrap=True)
        except KeyboardInterrupt:
            command = resume_line(starts[-1]["command"])
            console.print(f"stopped after {len(done)} trials; go on with: {command}", soft_wrap=True, highlight=False)
            raise
    planned = plan(study, done, budget, jobs)
    return Done(study, out, [done[key] for key in planned], _left_out(study, planned, budget), starts)


def plan(study: Study, done: dict[Key, Trial], budget: float, jobs: int) -> list[Key]:
    """Return the trials a budget in seconds covers, as far as the finished ones tell, seed by seed.

    The same trials give the same plan, so a study that was interrupted goes on as it had begun.
    """
    few, names, spent = min(FEW, len(study.seeds)), [], 0.0
    for name in study.named:
        if names and spent > budget / few:
            break
        names.append(name)
        if first := done.get((name, study.seeds[0])):
            spent += first.seconds / jobs
    rounds = len(study.seeds)
    if done and math.isfinite(budget):
        begun = 1 + max(study.seeds.index(seed) for _, seed in done)
        a_round = _expected(names, done) / jobs
        rounds = min(rounds, max(few, begun, int(budget / max(a_round, 1e-9))))
    return [(name, seed) for seed in study.seeds[:rounds] for name in names]


def _expected(names: Iterable[str], done: dict[Key, Trial]) -> float:
    """Return the seconds of trials under these conditions: the mean of the finished ones, all of them for new ones."""
    times: dict[str, list[float]] = {}
    for (name, _), trial in done.items():
        times.setdefault(name, []).append(trial.seconds)
    means = {name: sum(values) / len(values) for name, values in times.items()}
    usual = sum(means.values()) / max(1, len(means))
    return math.fsum(means.get(name, usual) for name in names)


def _left_out(study: Study, planned: list[Key], budget: float) -> str:
    """Say what the budget did not cover."""
    kept = {name for name, _ in planned}
    seeds, dropped = len({seed for _, seed in planned}), [c for name, c in study.named.items() if name not in kept]
    parts = []
    if seeds < len(study.seeds):
        parts.append(f"{len(study.seeds) - seeds} of {len(study.seeds)} seeds")
    if dropped:
        first = ", ".join(f"{name}={value}" for name, value in dropped[0].items())
        parts.append(f"the last {len(dropped)} of {len(study.named)} conditions, from ({first}) on")
    return f"The budget of {budget / 60:g} minutes left out {' and '.join(parts)}." if parts else ""


def _progress(planned: list[Key], done: dict[Key, Trial], jobs: int, elapsed: float) -> str:
    missing = [name for name, seed in planned if (name, seed) not in done]
    left = _expected(missing, done) / jobs
    number = len(planned) - len(missing)
    return f"trial {number} of {len(planned)}, {duration(elapsed)} so far, about {duration(left)} left"


def duration(seconds: float | int) -> str:
    """Return a time in the units a reader needs.

    >>> duration(8.2), duration(75), duration(3700)
    ('8 s', '1 min 15 s', '1 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole >= 3600 else f"{whole // 60} min {whole % 60} s"


def _record(study: Study, file: Path) -> list[dict[str, Any]]:
    """Add this start to the record of the study."""
    from mercer.bench.record import surroundings

    starts = json.loads(file.read_text(encoding="utf-8"))["starts"] if file.exists() else []
    starts.append(surroundings("cpu") | {"seeds": list(study.seeds)})
    starts[-1]["versions"] |= {name: version(name) for name in study.packages}
    file.write_text(json.dumps({"study": study.name, "starts": starts}, indent=1), encoding="utf-8")
    return starts


# Processes --------------------------------------------------------------------------------------------------------

Submit = Callable[[Key], "Future[Trial]"]


def _finish(study: Study, done: dict[Key, Trial], budget: float, jobs: int, submit: Submit) -> Iterator[Trial]:
    """Yield the missing trials of the plan as they end; the plan is made anew after each."""
    active: dict[Future[Trial], Key] = {}
    while True:
        busy = done.keys() | set(active.values())
        missing = [key for key in plan(study, done, budget, jobs) if key not in busy]
        for key in missing[: jobs - len(active)]:
            active[submit(key)] = key
        if not active:
            return
        for future in wait(active, return_when=FIRST_COMPLETED).done:
            del active[future]
            yield future.result()


@contextmanager
def _workers(study: Study, jobs: int, threads: int | None) -> Iterator[Submit]:
    """Give a function that starts a trial; processes end with the block, at once where an error ends it."""
    if jobs == 1:
        if threads:
            import torch

            torch.set_num_threads(threads)
        yield lambda key: _at_once(study, key)
        return
    others, before = set(multiprocessing.active_children()), os.environ.get("OMP_NUM_THREADS")
    threads = threads or max(1, (os.cpu_count() or 1) // jobs)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when the processes import their libraries
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_worker)
    try:
        yield lambda key: pool.submit(_timed, study.trial, study.named[key[0]], key[1])
        pool.shutdown()
    except BrokenProcessPool as error:
        raise RuntimeError("a process died; if memory was short, go on with --resume and fewer --jobs") from error
    finally:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        pool.shutdown(cancel_futures=True)
        os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)


def _at_once(study: Study, key: Key) -> "Future[Trial]":
    future: Future[Trial] = Future()
    future.set_result(_timed(study.trial, study.named[key[0]], key[1]))
    return future


def _timed(trial: Callable[..., dict[str, Any]], condition: dict[str, Any], seed: int) -> Trial:
    start = time.perf_counter()
    result = trial(seed=seed, **condition)
    return Trial(dict(condition), seed, time.perf_counter() - start, result)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its processes
