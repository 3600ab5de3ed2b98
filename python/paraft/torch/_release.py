"""The releases of torch that this package works with. It is imported before all that an older release does not have."""

from __future__ import annotations

import re

import torch

from ..errors import ConfigError

#: The oldest release that is tested, by `.ci/nightly oldest`. Before it a scheduler marks the `step()` that it wraps in another way, and
#: would seem to be a function of the script's own.
OLDEST = (2, 4)


def check(release: str) -> None:
    """Checks that this release of torch is new enough.

    Raises:
        ConfigError: it is not.
    """
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"torch {release} is older than {oldest}, the oldest release that paraft.torch works with: pip install 'torch>={oldest}'")


check(torch.__version__)
