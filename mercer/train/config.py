"""Recipes from and to YAML and the command line: every value checked by name, every unknown key refused."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from mercer.errors import unknown
from mercer.train.classifier_recipe import CLASSIFIERS, ClassifierRecipe
from mercer.train.recipe import RECIPES, Recipe

R = TypeVar("R", bound=Recipe | ClassifierRecipe)
Recipes = Mapping[str, Callable[[], R]]
_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a table of options"}


def named_recipe(name: str, table: Recipes[R] = RECIPES) -> R:
    """Return a recipe of a table by name: of language models, or `CLASSIFIERS`.

    Raises:
        ValueError: no recipe has this name.
    """
    if name not in table:
        raise unknown("recipe", name, table)
    return table[name]()


def table_of(recipe: R) -> Recipes[R]:
    """Return the table that a recipe is of."""
    table: Any = CLASSIFIERS if isinstance(recipe, ClassifierRecipe) else RECIPES
    return table


def to_dict(recipe: Recipe | ClassifierRecipe) -> dict[str, Any]:
    """Return a recipe as plain dicts and lists, ready for YAML or JSON."""
    return _plain(dataclasses.asdict(recipe))


def from_dict(values: Mapping[str, Any], table: Recipes[R] = RECIPES) -> R:
    """Build a recipe from nested dicts; what is missing comes from the recipe of the table that `name` names.

    Raises:
        ValueError: a key is unknown, or a value is of the wrong type or out of range; the key is named.
    """
    if "name" not in values:
        raise ValueError("the configuration names no recipe; give one on the command line or add a line `name: tiny`")
    return merge(named_recipe(str(values["name"]), table), values)


def merge(recipe: R, values: Mapping[str, Any]) -> R:
    """Return the recipe with the given (nested) values in place of its own.

    >>> from mercer.train.recipe import tiny
    >>> merge(tiny(), {"optim": {"lr": "1e-3"}, "seed": 3}).optim.lr
    0.001
    """
    return _merge(recipe, values, "")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a YAML table.
    """
    if not path.is_file():
        raise FileNotFoundError(f"configuration file {path} does not exist")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"configuration file {path} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise ValueError(f"configuration file {path} must hold a table of keys, such as `optim: {{lr: 1e-3}}`")
    return values


def write_yaml(recipe: Recipe | ClassifierRecipe) -> str:
    """Return the text of `config.yaml`; `from_dict(read_yaml(...))` gives the same recipe again."""
    return yaml.safe_dump(to_dict(recipe), sort_keys=False)


def parse_overrides(
    tokens: Sequence[str], options: Iterable[str] = (), kind: type[Recipe | ClassifierRecipe] = Recipe
) -> tuple[list[str], dict[str, Any]]:
    """Read `demo --optim.lr 1e-3 --model.mixer=cubit` into bare words and nested dicts.

    Args:
        tokens: the words of the command line that no option of the command took.
        options: those options, so that a misspelt one is recognised.
        kind: the record whose keys may be set.

    Raises:
        ValueError: an option is unknown (the nearest one is named) or lacks its value.

    >>> parse_overrides(["demo", "--optim.lr", "1e-3", "--model.mixer-options.share", "true"])
    (['demo'], {'optim': {'lr': '1e-3'}, 'model': {'mixer_options': {'share': 'true'}}})
    """
    words: list[str] = []
    values: dict[str, Any] = {}
    keys = keys_of(kind)
    for flag, text in _pairs(tokens):
        if not flag.startswith("--"):
            words.append(flag)
            continue
        key = flag.removeprefix("--").replace("-", "_")
        if key not in keys and not key.startswith("model.mixer_options."):
            raise _unknown_key(key, [*keys, *(option.replace("-", "_") for option in options)], flag=True)
        if text is None:
            raise ValueError(f"{flag} needs a value: {flag} VALUE")
        place = values
        *sections, leaf = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = text
    return words, values


def _pairs(tokens: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        flag, equals, text = token.partition("=")
        if not token.startswith("--"):
            yield token, None
        elif equals:
            yield flag, text
        elif position < len(tokens) and not tokens[position].startswith("--"):
            yield flag, tokens[position]
            position += 1
        else:
            yield flag, None


def _keys(kind: type, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            yield from _keys(typing.cast(type, field.type), f"{field.name}.")
        else:
            yield prefix + field.name


def keys_of(kind: type[Recipe | ClassifierRecipe]) -> tuple[str, ...]:
    """Return the dotted names of everything that can be set in a recipe."""
    return tuple(key for key in _keys(kind) if key != "name")


KEYS = tuple(dict.fromkeys([*keys_of(Recipe), *keys_of(ClassifierRecipe)]))  # of every kind of recipe


def _unknown_key(key: str, choices: Sequence[str], *, flag: bool = False) -> ValueError:
    shown = (lambda k: "--" + k.replace("_", "-")) if flag else (lambda k: k)
    choices = [choice for choice in choices if choice != key]  # an option of another command
    near = difflib.get_close_matches(key, choices, n=1, cutoff=0.5)
    if not near:  # a right name in the wrong section is the next likely slip
        near = [choice for choice in choices if choice.split(".")[-1] == key.split(".")[-1]]
    remedy = f"did you mean {shown(near[0])!r}?" if near else f"choose one of {', '.join(map(shown, choices))}"
    return ValueError(f"unknown {'option' if flag else 'key'} {shown(key)!r}; {remedy}")


def _merge(record: Any, values: Mapping[str, Any], prefix: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(record)}
    changes = {}
    for raw, value in values.items():
        name = str(raw).replace("-", "_")
        if name not in fields:
            raise _unknown_key(f"{prefix}{name}", [prefix + known for known in fields])
        current = getattr(record, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"{prefix}{name} ({value!r}) must be a table with the keys of {type(current).__name__}"
                )
            changes[name] = _merge(current, value, f"{prefix}{name}.")
        elif isinstance(current, dict) and isinstance(value, Mapping):
            changes[name] = {str(k).replace("-", "_"): _scalar(v) for k, v in (current | dict(value)).items()}
        else:
            changes[name] = _checked(value, fields[name].type, prefix + name)
    return dataclasses.replace(record, **changes)


def _scalar(value: Any) -> Any:
    """Read a word as YAML would, and as a number where YAML 1.1 does not (1e-3)."""
    if not isinstance(value, str):
        return value
    try:
        read = yaml.safe_load(value)
        return float(read) if isinstance(read, str) else read
    except (yaml.YAMLError, ValueError):
        return value


def _checked(value: Any, annotation: Any, key: str) -> Any:
    """Return the value as the annotation wants it, or raise by name."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is types.UnionType:  # X | None is the only union in a recipe
        empty = value is None or (isinstance(value, str) and value.lower() in ("null", "none"))
        return None if empty else _checked(value, arguments[0], key)
    if origin is Literal:
        if value not in arguments:
            raise unknown(key, str(value), arguments)
        return value
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or len(items) != len(arguments):
            raise ValueError(f"{key} ({value}) must be {len(arguments)} numbers, as 0.9,0.95")
        return tuple(_checked(item, kind, key) for item, kind in zip(items, arguments, strict=True))
    kind = dict if origin is dict else annotation
    read = value if kind is str else _scalar(value)
    if kind is float and isinstance(read, int) and not isinstance(read, bool):
        read = float(read)
    if not isinstance(read, kind) or (kind is int and isinstance(read, bool)):
        raise ValueError(f"{key} ({value!r}) must be {_WANTED[kind]}")
    return read


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
