"""What the servers do not hold, frozen parameters and buffers that are no running statistics, is the same on all workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from paraft.torch._flat import Flat  # noqa: E402
from paraft.torch._untrained import _described, _untrained  # noqa: E402
from torch import nn  # noqa: E402


class Adapted(nn.Module):
    """A frozen base of many layers, a trained one, and buffers of each kind."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(20, 20) for _ in range(layers)).requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(20), nn.Linear(20, 10)
        self.register_buffer("mask", torch.tensor([-torch.inf, 0.0]))
        self.register_buffer("places", torch.arange(20))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.base:
            x = layer(x) + x
        return self.head(self.norm(x))


def made(layers: int = 2) -> tuple[Adapted, torch.optim.Optimizer]:
    torch.manual_seed(3)
    m = Adapted(layers)
    return m, torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)


#: What is other on worker 1, and how a refusal names it.
CHANGES = {
    "frozen": ("base.1.bias", "`base.1.bias` differs"),
    "mask": ("mask", "`mask` differs"),
    "integer": ("places", "`places` differs"),
    "not persistent": ("cache", "`cache` differs"),
    "many": ("base.29.weight", "one of `base.29.weight` to `base.30.bias` differs (of 4)"),
}


def joins(case: str, apply: str, servers: list[str]) -> None:
    run = paraft.init(servers=servers, settings={"cluster.timeout_ms": 60_000})
    m, o = made(40 if case == "many" else 2)
    name, _ = CHANGES[case]
    if run.rank == 1:
        with torch.no_grad():
            t = dict((*m.named_parameters(), *m.named_buffers()))[name]
            t.view(-1)[-1] += 1
    run.prepare(m, o, apply=apply)
    run.close()


@pytest.mark.parametrize(("case", "apply"), [(case, "servers") for case in CHANGES] + [("frozen", "mean"), ("frozen", "worker")])
def test_what_differs_between_workers_is_refused_by_name(case: str, apply: str, start_fleet: Any, start_workers: Any) -> None:
    fleet = start_fleet(1)
    workers = start_workers(fleet, joins, 2, case, apply, fleet.servers)
    until = time.monotonic() + 60
    while not (refused := [w for w in workers if w.process.poll() is not None]) and time.monotonic() < until:
        time.sleep(0.05)
    assert refused and CHANGES[case][1] in refused[0].err and "ConfigError" in refused[0].err, [w.said() for w in workers]


def comes_back(apply: str, servers: list[str]) -> int:
    """Rank 1 leaves after three steps and joins again, as a script that is started again and has loaded its own checkpoint."""
    settings = {"cluster.grace_ms": 500}
    run = paraft.init(servers=servers, settings=settings)
    m, o = made()
    run.prepare(m, o, apply=apply)
    for i, batch in enumerate(models.batches("mlp", run.rank, 40)):
        if i == 3 and run.rank == 1:
            run.close()
            state = m.state_dict()
            m, o = made()
            m.load_state_dict(state)
            assert int(m.norm.num_batches_tracked) == 3
            run = paraft.init(servers=servers, settings=settings)
            run.prepare(m, o, apply=apply)
        models.loss(m, batch).backward()
        o.step()
        o.zero_grad()
        time.sleep(0.02)
    run.finish()
    return run.step


@pytest.mark.parametrize("apply", ["servers", "mean"])
def test_a_worker_with_the_same_comes_back(apply: str, start_fleet: Any, run_workers: Any) -> None:
    fleet = start_fleet(1)
    assert min(run_workers(fleet, comes_back, 2, apply, fleet.servers).values) >= 40


def test_every_byte_counts_and_nothing_is_held(tmp_path: Path) -> None:
    m, o = made()
    big = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16), requires_grad=False)
    m.register_parameter("big", big)
    flat = Flat(m, o, None)
    assert flat.values.numel() == sum(t.numel() for t in (*m.norm.parameters(), *m.head.parameters(), m.norm.running_mean, m.norm.running_var))
    tensors = list(_untrained(m, flat))
    assert [name for name, _ in tensors] == ["big", *(f"base.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")), "mask", "places", "cache"]
    before = _described(tensors)
    assert before == _described(tensors) and len(before) == 2 * len(tensors) + 11
    for at in (0, 40_000, 99_999):
        with torch.no_grad():
            big[at] = 1
        now = _described(tensors)
        assert now != before
        before = now
    with torch.no_grad():
        m.base[0].weight.copy_(m.base[0].weight.clone())
    assert _described(tensors) == before
