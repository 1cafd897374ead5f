"""Zero-shot and few-shot tasks through lm-evaluation-harness (the package `lm_eval`)."""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mercer.data.packages import require
from mercer.data.tokenizer import SPECIALS
from mercer.errors import DataError, unknown

if TYPE_CHECKING:
    import transformers

TASK_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class TaskScore:
    """One figure of one task.

    Args:
        task: its name.
        metric: as the task calls it: `acc`, `acc_norm`, `exact_match`, `word_perplexity`, ...
        filter: what was done to the answers before; `none` mostly.
        value: the figure.
        error: its standard error over the examples; None where the harness gives none.
        shots: solved examples that stood before each question.
        num_examples: how many questions; None for a group of tasks.
    """

    task: str
    metric: str
    filter: str
    value: float
    error: float | None
    shots: int
    num_examples: int | None


def evaluate_tasks(
    model: "transformers.PreTrainedModel",
    tokenizer: "transformers.PreTrainedTokenizerFast",
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    batch_size: int = 8,
) -> list[TaskScore]:
    """Measure a causal language model on tasks of lm-evaluation-harness.

    Args:
        model: any of transformers, its attention replaced or not.
        tokenizer: its tokenizer.
        tasks: names of the harness (`arc_easy`), or paths of task files of your own, ending in .yaml. Data files that
            a task file names are looked for beside it, then in the working folder.
        limit: questions of each task; all by default.
        shots: solved examples before each question; each task's own number by default.
        batch_size: questions at a time.

    Returns:
        The figures of every task, in the order of the harness.

    Raises:
        ValueError: no such task, no task at all, an argument out of range, or `lm_eval` is missing.
        FileNotFoundError: no such task file.
        DataError: the data of a task cannot be read.
    """
    if not tasks:
        raise ValueError("no tasks; name some, such as arc_easy or ./my_task.yaml")
    for name, number, least in (("limit", limit, 1), ("shots", shots, 0), ("batch_size", batch_size, 1)):
        if number is not None and number < least:
            raise ValueError(f"{name} ({number}) must be at least {least}")
    harness = require("lm_eval", extra="eval", purpose="measuring tasks")
    with _quiet():
        manager = _manager(tasks)
        loaded = [task for name in tasks for task in _load_task(manager, name)]
    was_training = model.training
    with _quiet():
        try:
            found = harness.simple_evaluate(
                model=harness_model(model, tokenizer, batch_size=batch_size),
                tasks=loaded,
                task_manager=manager,
                num_fewshot=shots,
                limit=limit,
                log_samples=False,
                bootstrap_iters=1000,
            )
        except AssertionError as error:  # how the harness refuses what a task file asks for
            raise ValueError(f"the tasks cannot be run: {str(error) or 'the harness gives no reason'}") from error
        finally:
            model.train(was_training)
    return list(_scores(found))


def harness_model(
    model: "transformers.PreTrainedModel",
    tokenizer: "transformers.PreTrainedTokenizerFast",
    *,
    batch_size: int = 8,
    max_length: int | None = None,
) -> Any:
    """Return a loaded model as the harness takes it: an `lm_eval.models.huggingface.HFLM`.

    Three things differ from the harness's own. A tokenizer of ours puts no begin token by itself, and its models have
    read one before every document, so one is put before every context. Log-likelihoods are computed without a cache.
    Where a task does not say how much to generate, it is at most half of what the model can hold.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        batch_size: requests at a time.
        max_length: tokens that a request may have; the model's own by default.

    Raises:
        ValueError: `lm_eval` is missing.
    """
    with _quiet():
        return _model_class()(model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)


@functools.cache
def _model_class() -> Any:
    base = require("lm_eval.models.huggingface", extra="eval", purpose="measuring tasks").HFLM

    class MercerLM(base):
        _whole = False  # a whole text is being measured, to which the harness itself gives a begin token

        @property
        def _begin(self) -> str:
            ours = self.tokenizer.bos_token == SPECIALS["bos_token"]
            return self.tokenizer.bos_token if ours and not self._whole else ""

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            begin = self._begin if add_special_tokens is not False and not string.startswith(self._begin) else ""
            return super().tok_encode(begin + string, add_special_tokens=add_special_tokens, **options)

        def tok_batch_encode(self, strings: Sequence[str], *arguments: Any, **options: Any) -> Any:
            return super().tok_batch_encode([self._begin + string for string in strings], *arguments, **options)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            self._whole = True
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
            finally:
                self._whole = False

        def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
            import torch

            with torch.no_grad():
                return self.model(input_ids=inps, use_cache=False).logits

        @property
        def max_gen_toks(self) -> int:
            return min(256, self.max_length // 2)

    return MercerLM


def _manager(names: Sequence[str]) -> Any:
    """Return the harness's index of tasks; its own 10,000 files (many seconds) only where a name asks for them."""
    tasks = require("lm_eval.tasks", extra="eval", purpose="measuring tasks")
    return tasks.TaskManager(include_defaults=not all(name.endswith(TASK_ENDINGS) for name in names))


def _load_task(manager: Any, name: str) -> list[Any]:
    return _load_file(manager, Path(name)) if name.endswith(TASK_ENDINGS) else _load_name(manager, name)


def _load_name(manager: Any, name: str) -> list[Any]:
    if name not in manager.task_index:
        raise unknown_task(name, manager.all_tasks)
    return _load(manager, name, name)


def unknown_task(name: str, tasks: Sequence[str]) -> ValueError:
    """Return the error for a task that the harness does not have: the nearest names, not all of them.

    >>> str(unknown_task("arc_eazy", ["arc_easy", "boolq"]))
    "unknown task 'arc_eazy'; did you mean 'arc_easy'? A task file of yours must end in .yaml"
    """
    nearest = str(unknown("task", name, tasks)).partition(" (did you mean ")[2]
    hint = f"did you mean {nearest[:-1]} " if nearest else f"the harness has {len(tasks)} others. "
    return ValueError(f"unknown task {name!r}; {hint}A task file of yours must end in .yaml")


def _load_file(manager: Any, path: Path) -> list[Any]:
    path = path.expanduser().absolute()
    if not path.is_file():
        raise FileNotFoundError(f"no such task file: {path}; give a path that exists or the name of a task")
    try:
        described = yaml.load(path.read_bytes(), Loader=_Plain)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no task file: {' '.join(str(error).split())}; write it as YAML") from error
    if not isinstance(described, dict) or not described.keys() & {"task", "group", "include"}:
        raise ValueError(f"{path} is no task file: it names no task; begin it with a line such as task: my_task")
    with contextlib.chdir(_data_folder(described, path.parent)):
        return _load(manager, str(path), str(path))


class _Plain(yaml.SafeLoader):
    """Reads a task file without running the functions it names."""


_Plain.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))


def _data_folder(described: dict[str, Any], folder: Path) -> Path:
    """Return the folder from which the data files that a task names can be opened: its own where they are there."""
    files = (described.get("dataset_kwargs") or {}).get("data_files") or []
    named = list(_strings(files))
    return folder if any((folder / name).exists() for name in named) else Path.cwd()


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (name for part in value.values() for name in _strings(part))
    elif isinstance(value, list):
        yield from (name for part in value for name in _strings(part))


def _load(manager: Any, spec: str, name: str) -> list[Any]:
    try:
        found = manager.load([spec])
    except (OSError, ConnectionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"the data of task {name} cannot be read: {reason}; check the network or its files") from error
    except (KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{name} is no task that the harness can build: {type(error).__name__} {error}") from error
    groups = list(found["groups"].values())
    inside = {task.task_name for group in groups for task in group.get_all_tasks()}
    return [*groups, *(task for key, task in found["tasks"].items() if key not in inside)]


def _scores(found: dict[str, Any]) -> Iterator[TaskScore]:
    counts = {name: number["effective"] for name, number in found.get("n-samples", {}).items()}
    for task, figures in found["results"].items():
        for key, value in figures.items():
            metric, _, filtered = key.partition(",")
            if metric.endswith("_stderr") or not filtered or not isinstance(value, int | float):
                continue
            error = figures.get(f"{metric}_stderr,{filtered}")
            known = isinstance(error, int | float) and math.isfinite(error)
            shots = found["n-shot"].get(task)
            yield TaskScore(
                task=task,
                metric=metric,
                filter=filtered,
                value=float(value),
                error=float(error) if known else None,
                shots=shots if isinstance(shots, int) else 0,
                num_examples=counts.get(task),
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness from telling what it does; what is wrong it raises."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
