"""Constraints on parameters, applied by the servers after each step: ``run.prepare(model, optimizer,
constraints={"critic.*": paraft.clamp(-0.01, 0.01)})``."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ._run import toml
from .errors import ConfigError


class Constraint(NamedTuple):
    """A constraint on a parameter; :func:`clamp`, :func:`unit_norm` and :func:`max_norm` create one.

    Attributes:
        rule: its entry in a job file's ``[constraints]``.
    """

    rule: Mapping[str, Any]


def clamp(min: float = -math.inf, max: float = math.inf) -> Constraint:
    """Each value stays within ``min`` and ``max``, as with ``p.clamp_(min, max)`` after each ``optimizer.step()``."""
    return Constraint({"clamp": [float(min), float(max)]})


def unit_norm() -> Constraint:
    """Each row gets the Euclidean norm 1; a row of zeros stays zero.

    Rows are those of the first dimension, all others in one: of ``nn.Linear`` the weights of an output, of ``nn.Embedding`` a vector. A
    parameter of one dimension is one row.
    """
    return Constraint({"unit_norm": True})


def max_norm(max: float) -> Constraint:
    """Each row (see :func:`unit_norm`) gets at most the Euclidean norm ``max``, above 0, as with ``torch.renorm(p, 2,
    0, max)``."""
    return Constraint({"max_norm": float(max)})


def settings(constraints: Mapping[str, Constraint], names: Mapping[str, str], frozen: Collection[str] = ()) -> list[str]:
    """Settings for the job's ``[constraints]``; ``names``: maps each name that the script may use for a trained
    parameter to the servers' name.

    Raises:
        ConfigError: an entry is not a name with a constraint, or two entries contradict each other for a parameter.
    """
    if not isinstance(constraints, Mapping):
        raise ConfigError(f"constraints is {type(constraints).__name__}; it is a dict of names, each with a constraint")
    rules: dict[str, dict[str, Any]] = {}
    for name, constraint in constraints.items():
        if not isinstance(name, str) or not isinstance(constraint, Constraint):
            raise ConfigError(
                f"constraints has {name!r}: {constraint!r}; write a parameter's name, in which * stands for any characters, with "
                "paraft.clamp(), paraft.unit_norm() or paraft.max_norm()"
            )
        pattern = re.compile(".*".join(map(re.escape, name.split("*"))), re.DOTALL)
        if name in frozen:
            raise ConfigError(f"constraints has `{name}`, which is frozen: the servers do not have it, and it stays as it is")
        # The caller knows all tensors, so it reports names that match no parameter.
        for its in {names[known]: None for known in names if pattern.fullmatch(known)} or (name,):
            rule = rules.setdefault(its, {})
            for key, value in constraint.rule.items():
                if rule.setdefault(key, value) != value:
                    raise ConfigError(f"constraints has two of {key} for `{its}`: {rule[key]} and {value}; keep one")
    return [f"constraints={toml(rules)}"] if rules else []
