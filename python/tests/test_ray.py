"""`paraft.ray` without a cluster: tests/engines/ray has the rest."""

from __future__ import annotations

import sys

import paraft
import paraft.ray
import pytest


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "ray"] + ["ray"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(paraft.ConfigError, match="pip install 'ray"):
        paraft.ray.fit(print)
