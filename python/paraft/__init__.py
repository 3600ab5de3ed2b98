"""Train models on machines that fail.

Weights and optimizer state live on servers that replicate them; a script's workers push gradients and pull weights::

    import paraft.torch

    run = paraft.init()                                   # under `paraft launch`, or with a fleet of `paraft.local()`
    model, optimizer = run.prepare(model, optimizer)
    for x, y in loader:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish()
"""

from __future__ import annotations

from ._constraints import Constraint, clamp, max_norm, unit_norm
from ._fleet import Fleet, local
from ._paraft import __version__
from ._reader import Reader, Version, reader
from ._run import Run, init
from .errors import (
    ConfigError,
    DataError,
    DivergedError,
    JobEndedError,
    MisuseError,
    OtherFoundingError,
    ParaftError,
    RecordError,
    UnavailableError,
    VersionNotKeptError,
    VersionTimeoutError,
)

__all__ = [
    "ConfigError",
    "Constraint",
    "DataError",
    "DivergedError",
    "Fleet",
    "JobEndedError",
    "MisuseError",
    "OtherFoundingError",
    "ParaftError",
    "Reader",
    "RecordError",
    "Run",
    "UnavailableError",
    "Version",
    "VersionNotKeptError",
    "VersionTimeoutError",
    "__version__",
    "clamp",
    "init",
    "local",
    "max_norm",
    "reader",
    "unit_norm",
]
