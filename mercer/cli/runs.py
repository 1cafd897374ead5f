"""Several training runs: one after the other in this process, or a few side by side in processes of their own."""

import contextlib
import dataclasses
import json
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import connection, forkserver, get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from mercer.cli.quiet import filter_warnings, silence_libraries
from mercer.train.recipe import Recipe
from mercer.train.record import Run


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to do."""

    recipe: Recipe
    out: Path
    resume: bool
    overwrite: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended; `failure` says why, where its numbers were no longer finite."""

    run: Run
    failure: str | None = None


Report = Callable[[Outcome], None]


def train_in_turn(jobs: list[Job], report: Report) -> list[Outcome]:
    """Train one after the other; stop at the first that is interrupted."""
    outcomes = []
    for job in jobs:
        outcomes.append(_train(job, None))
        if outcomes[-1].run.status == "interrupted":
            break
        report(outcomes[-1])
    return outcomes


def train_side_by_side(jobs: list[Job], report: Report, *, processes: int, threads: int) -> list[Outcome]:
    """Train several at a time, each in a process of its own, which also keeps their peak memories apart.

    Args:
        jobs: what to train.
        report: called with each that has ended.
        processes: how many at a time.
        threads: CPU threads of each.

    Returns:
        The outcomes in the order of the jobs, without those that had not begun when an interruption came.

    Raises:
        RuntimeError: a process died without a word.
    """
    from mercer.train import setup
    from mercer.train.interrupt import Interruption

    for recipe in [job.recipe for job in jobs]:  # once for all, and what is wrong with the text is said here
        setup.load_data(recipe.data, recipe.seed, None)
    context = start_server()
    waiting, active = list(enumerate(jobs)), dict[int, _Worker]()
    outcomes: dict[int, Outcome] = {}
    with Interruption() as interruption, _Board() as board:
        try:
            while active or (waiting and not interruption.requested):
                while waiting and len(active) < processes and not interruption.requested:
                    number, job = waiting.pop(0)
                    active[number] = _Worker(context, job, threads)
                for worker in active.values() if interruption.requested else ():
                    worker.stop()
                board.show([worker.job for worker in active.values()])
                ended = connection.wait([worker.pipe for worker in active.values()], timeout=0.3)
                for number in [number for number, worker in active.items() if worker.pipe in ended]:
                    outcome = active.pop(number).outcome()
                    if outcome is None:
                        continue
                    outcomes[number] = outcome
                    if outcomes[number].run.status != "interrupted":
                        report(outcomes[number])
        finally:
            for worker in active.values():  # after an error in one, the others save what they have
                worker.stop()
            for worker in active.values():
                worker.drain()
    return [outcomes[number] for number in sorted(outcomes)]


def start_server() -> Any:
    """Start the process that the others are forked from, with torch and transformers imported; return its context."""
    if os.name != "posix":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["mercer.train.loop"])
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for the parent alone
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, before)
    return context


def _train(job: Job, console: Console | None) -> Outcome:
    from mercer.train import loop
    from mercer.train.folder import RunFolder

    try:
        return Outcome(loop.train(job.recipe, job.out, resume=job.resume, overwrite=job.overwrite, console=console))
    except FloatingPointError as error:
        results = RunFolder(job.out).results
        return Outcome(Run.from_json(results.read_text(encoding="utf-8"), str(results)), str(error))


class _Worker:
    """A process that does one job and sends its outcome, or the error that ended it."""

    def __init__(self, context: Any, job: Job, threads: int):
        self.job, self._told = job, False
        self.pipe, there = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(job, threads, there, os.getcwd()))
        self._process.start()
        there.close()

    def outcome(self) -> Outcome | None:
        """Receive the outcome, None if the run was stopped before its first step; raise what the process raised."""
        try:
            sent = self.pipe.recv()
        except EOFError:
            self._process.join()
            if self._told and self._process.exitcode == -signal.SIGTERM:
                return None  # it had not got as far as to listen
            raise RuntimeError(
                f"the process of {self.job.out} died with exit code {self._process.exitcode}; if memory was short, "
                "go on with --resume and fewer --jobs"
            ) from None
        self._process.join()
        if isinstance(sent, KeyboardInterrupt):
            return None
        if isinstance(sent, BaseException):
            raise sent
        return sent

    def stop(self) -> None:
        """Ask the process to save a checkpoint and end; once, as a second signal would end it before it has saved."""
        if not self._told:
            self._process.terminate()
        self._told = True

    def drain(self) -> None:
        """Wait until the process has ended."""
        with contextlib.suppress(EOFError):
            self.pipe.recv()
        self._process.join()


class _Board:
    """A line for each run in progress, read from its metrics.jsonl; nothing where there is no terminal."""

    def __init__(self):
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._lines: dict[Path, TaskID] = {}

    def __enter__(self) -> "_Board":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, jobs: list[Job]) -> None:
        """Bring the lines up to date: those of these jobs and no others."""
        if self._progress.disable:
            return
        for gone in self._lines.keys() - {job.out for job in jobs}:
            self._progress.remove_task(self._lines.pop(gone))
        for job in jobs:
            if job.out not in self._lines:
                steps = job.recipe.train.steps
                self._lines[job.out] = self._progress.add_task(job.out.name, total=steps, text="starting")
            if row := last_row(job.out / "metrics.jsonl"):
                text = f"loss {row['train_loss']:.3f}  {row['tokens_per_second']:,.0f} tokens/s"
                self._progress.update(self._lines[job.out], completed=row["step"], text=text)


def last_row(file: Path) -> dict[str, Any] | None:
    """Return the last whole row of a metrics.jsonl that is being written."""
    if not file.is_file():
        return None
    with file.open("rb") as read:
        read.seek(max(0, file.stat().st_size - 4096))  # a row has some 250 bytes
        lines = read.read().split(b"\n")
    return json.loads(lines[-2]) if len(lines) > 2 else None


def _work(job: Job, threads: int, pipe: connection.Connection, folder: str) -> None:
    os.setpgrp()  # Ctrl-C reaches the parent alone, which passes it on once
    os.chdir(folder)
    silence_libraries()
    filter_warnings()
    import torch

    torch.set_num_threads(threads)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            pipe.send(_train(job, Console(file=nowhere)))
    except (RuntimeError, ValueError, OSError, ArithmeticError, ImportError, KeyboardInterrupt) as error:
        pipe.send(error)
