"""A sweep's search space: a space file, as for ``paraft sweep`` (docs/sweeps.md), for an Optuna trial."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from ._run import toml
from .errors import ConfigError

if TYPE_CHECKING:
    from optuna.trial import Trial

#: A trial's settings, by the job file's keys.
Settings = Mapping[str, Any]


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
        ConfigError: it cannot be read.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # already a dependency of Optuna there
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"{path}: {e}") from None


@dataclass(frozen=True)
class _OneOf:
    """One of these values. A study's storage keeps only strings and numbers, so a list is identified by its text."""

    values: dict[Union[str, int, float, bool], Any]

    def suggest(self, trial: Trial, key: str) -> Any:
        chosen: Any = trial.suggest_categorical(key, list(self.values))
        return self.values[chosen]


@dataclass(frozen=True)
class _Range:
    low: float
    high: float
    log: bool
    whole: bool

    def suggest(self, trial: Trial, key: str) -> Any:
        if self.whole:
            return trial.suggest_int(key, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(key, self.low, self.high, log=self.log)


def suggestions(space: Union[str, os.PathLike[str], Callable[[Trial], Settings]], metric: str) -> Callable[[Trial], Settings]:
    """A function that suggests a trial's settings. The space file must use this metric.

    Raises:
        ConfigError: the file is not a space file, or uses another metric.
    """
    if callable(space):
        return space
    path = Path(space)
    file = read_toml(path)
    try:
        asked, axes = _axes(file)
    except ValueError as e:
        raise ConfigError(f"{path}: {e}") from None
    if asked != metric:
        right = "maximize" if asked == "accuracy" else "minimize"
        raise ConfigError(f'{path}: metric = "{asked}", and the study looks for the best {metric}: create_study(direction="{right}")')
    return lambda trial: {key: axis.suggest(trial, key) for key, axis in axes.items()}


def _axes(file: dict[str, Any]) -> tuple[str, dict[str, Union[_OneOf, _Range]]]:
    """The metric and the axes of a space file, as ``paraft sweep`` reads them."""
    metric = file.pop("metric", "accuracy")
    if metric not in ("accuracy", "loss"):
        raise ValueError(f'metric = {toml(metric)}: it is "accuracy" or "loss"')
    space = file.pop("space", None)
    if not isinstance(space, dict):
        raise ValueError("it has no [space]")
    for key in file:
        raise ValueError(f"`{key}` is neither metric nor [space]")
    axes = dict(_collect("", space))
    if not axes:
        raise ValueError("[space] is empty")
    return metric, axes


def _collect(before: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Union[_OneOf, _Range]]]:
    """Accepts dotted keys and nested tables."""
    for name, value in table.items():
        key = f"{before}{name}"
        if isinstance(value, list):
            if not value:
                raise ValueError(f"`{key}` has no values")
            texts = [toml(v) for v in value]
            for i, text in enumerate(texts):
                if text in texts[:i]:
                    raise ValueError(f"`{key}` has {text} twice")
            # 1 and true, or 1 and 1.0, are the same key of a dictionary and the same choice for Optuna.
            plain = all(isinstance(v, (str, int, float)) for v in value) and len(set(value)) == len(value)
            yield key, _OneOf(dict(zip(value if plain else texts, value)))
        elif isinstance(value, dict) and ("min" in value or "max" in value):
            yield key, _range(key, value)
        elif isinstance(value, dict):
            yield from _collect(f"{key}.", value)
        else:
            raise ValueError(f"`{key}` = {toml(value)} is neither a list of values nor a range")


def _range(key: str, table: Mapping[str, Any]) -> _Range:
    for end in ("min", "max"):
        if end not in table:
            raise ValueError(f"`{key}`: a range has min and max")
        value = table[end]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            raise ValueError(f"`{key}`: {end} = {toml(value)} is no number")
    low, high, log = table["min"], table["max"], table.get("log", False)
    if low >= high:
        raise ValueError(f"`{key}`: min is not below max")
    if not isinstance(log, bool):
        raise ValueError(f"`{key}`: log = {toml(log)} is neither true nor false")
    if log and low <= 0:
        raise ValueError(f"`{key}`: a range with log = true is above 0")
    # `points` is for the grid of `paraft sweep`: a sampler ignores it.
    for other in sorted(set(table) - {"min", "max", "log", "points"}):
        raise ValueError(f"`{key}`: a range has min, max, log and points, and no `{other}`")
    return _Range(low, high, log, isinstance(low, int) and isinstance(high, int))
