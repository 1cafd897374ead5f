"""`mercer generate` and `mercer eval`."""

from pathlib import Path
from typing import Any

from mercer.cli.benches import whole_numbers
from mercer.cli.threads import set_threads


def generate(
    folder: Path,
    /,
    *,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    threads: int | None = None,
) -> int:
    """Continue a text, written as it comes: `mercer generate runs/demo-cubit-s0 --prompt "def "`.

    **Examples**

    ```
    mercer generate runs/tiny-cubit-s0 --prompt "Once upon" --max-new-tokens 100
    mercer generate runs/tiny-cubit-s0 --prompt "Once upon" --temperature 0
    ```

    Args:
        folder: a run's folder, or any folder with a model and its tokenizer.
        prompt: the text to continue.
        max_new_tokens: where to stop, if the model does not stop before.
        temperature: below 1 the likely gets likelier; 0 always takes the likeliest token.
        seed: of the draws; the same seed gives the same text.
        threads: CPU threads to compute with.
    """
    if temperature < 0 or max_new_tokens < 1:
        raise ValueError(
            f"temperature ({temperature}) must not be negative, max_new_tokens ({max_new_tokens}) must be at least 1"
        )
    path = model_folder(folder)
    import torch
    from transformers import TextStreamer

    set_threads(threads)
    tokenizer, model = load_tokenizer(path), open_model(path)
    ids = tokenizer(prompt).input_ids
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:1] != [bos]:  # every document of the training began with it
        ids = [bos, *ids]
    if not ids:
        raise ValueError("the prompt is empty and the tokenizer has no begin token; give --prompt TEXT")
    check_positions(model, len(ids) + max_new_tokens, "give a shorter prompt or a smaller --max-new-tokens")
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    inputs = torch.tensor([ids], device=model.device)
    model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    return 0


def evaluate_model(
    folder: Path,
    /,
    *,
    source: str | None = None,
    length: int | None = None,
    windows: int | None = None,
    recall: str | None = None,
    tasks: str | None = None,
    limit: int | None = None,
    shots: int | None = None,
    batch_size: int = 16,
    threads: int | None = None,
    json: bool = False,
) -> int:
    """Measure a model: loss, bits per byte, perplexity, and the loss by position: `mercer eval runs/demo-cubit-s0`.

    With `--tasks`, measure it on tasks of lm-evaluation-harness instead: by name, which downloads their data, or task
    files of your own (.yaml, with their data in jsonl files beside them), which need no network.

    **Examples**

    ```
    mercer eval runs/tiny-cubit-s0
    mercer eval runs/tiny-cubit-s0 --source other_text.txt --length 1024
    mercer eval my_model_folder --source python-docs --recall 32,128,512
    mercer eval my_model_folder --tasks arc_easy,./my_task.yaml --limit 100 --shots 5
    ```

    Args:
        folder: a run's folder, or any folder with a model and its tokenizer.
        source: a corpus, a path or hf:NAME, whose validation documents are read; the run's own by default.
        length: tokens in a window; the run's own by default, else 512.
        windows: how many windows, evenly spaced; all by default.
        recall: distances in tokens, between commas: the model reads a number once and is asked for it after so many.
        tasks: names of the harness and paths of task files, between commas.
        limit: questions of each task; all by default.
        shots: solved examples before each question; each task's own number by default.
        batch_size: windows or questions at a time.
        threads: CPU threads to compute with.
        json: print one JSON object instead of a table.
    """
    path = model_folder(folder)
    text_options = {"--source": source, "--length": length, "--windows": windows, "--recall": recall}
    _refuse(text_options if tasks is not None else {"--limit": limit, "--shots": shots}, with_tasks=tasks is not None)
    if tasks is not None:
        return _evaluate_tasks(path, tasks, limit, shots, batch_size, threads, as_json=json)
    distances = whole_numbers("recall", recall) if recall else []
    data, seed = _data_config(folder, path, source, length)

    from mercer.evaluate import evaluate
    from mercer.train import setup
    from mercer.train.loop import spaced

    set_threads(threads)
    model = open_model(path)
    check_positions(model, data.length, "give a smaller --length")
    tokenizer, packed = setup.load_data(data, seed, None)
    found = evaluate(model, spaced(packed.validation, batch_size, windows))
    _print_evaluation(found, _recalled(model, tokenizer, packed.validation, distances), as_json=json)
    return 0


def _recalled(model: Any, tokenizer: Any, split: Any, distances: list[int]) -> list[Any]:
    from mercer.evaluate.recall import filler_of, questions, recall

    if not distances:
        return []
    filler = filler_of(split.sequential(8), tokenizer, 4 * max(distances) + 64)
    longest = next(questions(tokenizer, filler, max(distances), trials=1))
    check_positions(model, len(longest.ids), "give smaller distances for --recall")
    return recall(model, tokenizer, filler, distances)


def _refuse(options: dict[str, Any], *, with_tasks: bool) -> None:
    given = ", ".join(name for name, value in options.items() if value is not None)
    if given:
        rule = "is for texts, and --tasks measures tasks" if with_tasks else "is for tasks; name some with --tasks"
        raise ValueError(f"{given} {rule}")


def _evaluate_tasks(
    path: Path,
    tasks: str,
    limit: int | None,
    shots: int | None,
    batch_size: int,
    threads: int | None,
    *,
    as_json: bool,
) -> int:

    from mercer.evaluate.harness import evaluate_tasks

    set_threads(threads)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    model, tokenizer = open_model(path), load_tokenizer(path)
    found = evaluate_tasks(model, tokenizer, names, limit=limit, shots=shots, batch_size=batch_size)
    _print_tasks(found, as_json=as_json)
    return 0


def model_folder(folder: Path) -> Path:
    """Return where the model lies: the folder itself, or `model/` in the folder of a run.

    Raises:
        FileNotFoundError: there is no such folder, or no model in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder {folder} does not exist; give a run's folder or one with a model")
    for path in (folder / "model", folder):
        if (path / "config.json").is_file():
            return path
    if (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"{folder} holds an unfinished run without a model; finish it with --resume")
    raise FileNotFoundError(f"folder {folder} holds no model: no config.json, and no model/config.json")


def open_model(path: Path) -> Any:
    """Load the model of a folder: with its mixers, or, where it has none, as transformers has it.

    Raises:
        ValueError: it does not predict the next token.
    """
    import json

    from mercer.hf import load
    from mercer.hf.source import find_source, read_model

    try:
        plain = not json.loads((path / "config.json").read_text()).get("mercer")
    except (ValueError, AttributeError):
        plain = False  # a damaged file: loading says what is wrong with it
    model = read_model(find_source(path)) if plain else load(path)
    check_decoder(model)
    return model


def check_decoder(model: Any) -> None:
    """Refuse a model that does not predict the next token: an encoder, or a classifier."""
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ValueError(f"{type(model).__name__} does not predict the next token; give a causal language model")


def check_positions(model: Any, length: int, remedy: str) -> None:
    """Refuse texts longer than a model has positions, where it learned a vector for each (GPT-2, OPT)."""
    from torch.nn import Embedding

    limit = getattr(model.config, "max_position_embeddings", None)
    tables = [name for name, part in model.named_modules() if isinstance(part, Embedding)]
    if limit is not None and length > limit and any("position" in name or name.endswith("wpe") for name in tables):
        raise ValueError(f"{type(model).__name__} has {limit} positions, and a text has {length} tokens; {remedy}")


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer beside a model."""
    from mercer.data import build_tokenizer

    return build_tokenizer(str(path), [], None)


def _data_config(folder: Path, path: Path, source: str | None, length: int | None) -> tuple[Any, int]:
    import dataclasses

    from mercer.train import config
    from mercer.train.recipe import DataConfig

    tokenizer = str(path)
    if (folder / "config.yaml").is_file():
        recipe = config.from_dict(config.read_yaml(folder / "config.yaml"))
        data = dataclasses.replace(recipe.data, tokenizer=tokenizer)
        seed = recipe.seed
    elif source is None:
        raise ValueError(f"{folder} is not a run, so it names no text; give --source")
    else:
        data, seed = DataConfig(tokenizer=tokenizer, length=512), 0
    changes: dict[str, Any] = {} if source is None else {"source": source}
    return dataclasses.replace(data, **changes | ({} if length is None else {"length": length})), seed


def _print_evaluation(found: Any, recalled: list[Any], *, as_json: bool) -> None:
    import dataclasses
    import json

    if as_json:
        print(json.dumps(dataclasses.asdict(found) | {"recall": [dataclasses.asdict(row) for row in recalled]}))
        return
    from rich.console import Console
    from rich.table import Table

    print(
        f"loss {found.loss:.4f} nats/token  bits/byte {found.bits_per_byte:.4f}  perplexity {found.perplexity:.2f}  "
        f"accuracy {found.accuracy:.1%}  ({found.num_tokens:,} tokens, {found.num_bytes:,} bytes)"
    )
    table = Table("position", "loss", "tokens", title="loss by position in the document")
    for start, end, loss, tokens in found.loss_by_position:
        table.add_row(f"{start} to {end - 1}", f"{loss:.4f}", f"{tokens:,}")
    Console().print(table)
    if recalled:
        print("recall of a number, read once and asked for after so many tokens:")
        table = Table("distance", "recalled", "loss")
        for row in recalled:
            table.add_row(str(row.distance), f"{row.accuracy:.0%} of {row.trials}", f"{row.loss:.3f}")
        Console().print(table)


def _print_tasks(found: list[Any], *, as_json: bool) -> None:
    import dataclasses
    import json

    if as_json:
        print(json.dumps([dataclasses.asdict(score) for score in found]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "shots", "questions", "metric", "value", "standard error")
    for score in found:
        metric = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
        error = "-" if score.error is None else f"{score.error:.4f}"
        questions = "-" if score.num_examples is None else f"{score.num_examples:,}"
        table.add_row(score.task, str(score.shots), questions, metric, f"{score.value:.4f}", error)
    Console().print(table)
