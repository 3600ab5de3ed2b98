"""Steps of a training loop, on DDP and on Paraft alike, that several tests compare: what a script does between ``backward()`` and
``optimizer.step()``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

import models
import paraft
import paraft.torch
import pytest
import torch
from models import SMALL_BUCKETS, apart
from torch import nn
from torch.nn.utils import clip_grad_norm_

STEPS = 30
Norms = list[float]
#: The workers' steps with an infinite gradient, of rank 1.
BURSTS = (3, 17)


class Branches(nn.Module):
    """A model of which rank 0 uses a part alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.uses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        return self.last(self.second(h).relu() if self.uses else h)


class Loop:
    """What a script has."""

    def __init__(self, forward: nn.Module, m: nn.Module, all_of: list[torch.optim.Optimizer], no_sync: Callable[[], Any], rank: int, scale: float) -> None:
        self.forward, self.m, self.all, self.no_sync, self.rank = forward, m, all_of, no_sync, rank
        self.o = all_of[0]
        self.noise = torch.Generator().manual_seed(5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
        self.norms: Norms = []

    def params(self) -> list[Any]:
        return list(self.m.parameters())

    def of(self, place: int) -> list[Any]:
        """The parameters of one of several optimizers."""
        return [p for group in self.all[place].param_groups for p in group["params"]]

    def backward(self, batch: models.Batch) -> torch.Tensor:
        loss = models.loss(self.forward, batch)
        loss.backward()
        return loss

    def said(self, norm: torch.Tensor) -> None:
        self.norms.append(float(norm))


def by_norm(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    loop.said(nn.utils.clip_grad_norm_(loop.m.parameters(), 0.1))
    loop.o.step()


def by_inf_norm(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    loop.said(clip_grad_norm_(loop.params(), max_norm=0.02, norm_type=math.inf, foreach=i % 2 == 0))
    loop.o.step()


def by_value(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    nn.utils.clip_grad_value_(parameters=loop.m.parameters(), clip_value=0.003)
    loop.o.step()


def per_module(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    loop.said(clip_grad_norm_(loop.m[2].weight, 0.03))
    loop.said(clip_grad_norm_(loop.m[0].parameters(), 0.05, norm_type=3))
    loop.o.step()


def in_two_calls(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    norm = nn.utils.get_total_norm([p.grad for p in loop.params()], 1.0)
    nn.utils.clip_grads_with_norm_(loop.params(), 0.5, norm)
    loop.said(norm)
    loop.o.step()
    loop.said(nn.utils.get_total_norm([p.grad for p in loop.params()]))  # of the step that is made


def with_noise(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    loop.said(clip_grad_norm_(loop.params(), math.inf))
    for p in loop.params():
        p.grad.mul_(0.5).add_(torch.randn(p.shape, generator=loop.noise), alpha=1e-3)
    loop.m[0].bias.grad = None
    loop.o.step()


def accumulated(loop: Loop, batch: models.Batch, i: int) -> None:
    x, y = batch
    with loop.no_sync():
        loop.backward((x[:4], y[:4]))
        clip_grad_norm_(loop.params(), 10.0)  # each worker's own, as DDP's
    loop.backward((x[4:], y[4:]))
    loop.said(clip_grad_norm_(loop.params(), 0.1))
    loop.o.step()


def in_a_closure(loop: Loop, batch: models.Batch, i: int) -> None:
    def closure() -> torch.Tensor:
        loop.o.zero_grad()
        loss = loop.backward(batch)
        loop.said(clip_grad_norm_(loop.params(), 0.1))
        return loss

    loop.o.step(closure)


def on_the_way(loop: Loop, batch: models.Batch, i: int) -> None:
    """The first of two backward passes is clipped too, as DDP's mean."""
    x, y = batch
    loop.backward((x[:4], y[:4]))
    loop.said(clip_grad_norm_(loop.params(), 0.05))
    loop.backward((x[4:], y[4:]))
    loop.said(clip_grad_norm_(loop.params(), 0.1))
    loop.o.step()


def left_out(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    norm = clip_grad_norm_(loop.params(), 0.1)
    loop.said(norm)
    if i % 3:
        loop.o.step()
    elif i % 2:
        loop.m.zero_grad()


def of_some(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.m.uses = loop.rank == 0
    loop.backward(batch)
    loop.said(clip_grad_norm_(loop.m.second.parameters(), 0.01))
    loop.said(clip_grad_norm_(loop.m.parameters(), 0.1))
    loop.o.step()


def scaled(loop: Loop, batch: models.Batch, i: int, unscales: bool = True) -> None:
    loss = models.loss(loop.forward, batch) * (math.inf if i in BURSTS and loop.rank == 1 else 1.0)
    loop.scaler.scale(loss).backward()
    if unscales:
        for o in loop.all:
            loop.scaler.unscale_(o)
        norm = clip_grad_norm_(loop.params(), 0.1)
        loop.said(norm if norm.isfinite() else torch.tensor(-1.0))
    for o in loop.all:
        loop.scaler.step(o)
    loop.scaler.update()
    loop.norms.append(loop.scaler.get_scale())


def scaled_alone(loop: Loop, batch: models.Batch, i: int) -> None:
    scaled(loop, batch, i, unscales=False)


def amsgrad(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, lr=1e-3, amsgrad=True)


def momentum(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.1, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loop's step and its optimizers, of these parameters, and how far the weights may be from DDP's."""

    step: Callable[[Loop, models.Batch, int], None]
    optimizers: Callable[[Any], Any]
    servers: int = 1
    within: float = 2e-7
    #: Pushes during the backward pass.
    early: bool = False
    model: Callable[[], nn.Module] = lambda: models.model("mlp", 0)
    #: DDP must look for parameters without a gradient.
    some_unused: bool = False
    #: The loop calls zero_grad() behind the step, which keeps the memory in each second one.
    zeroes: bool = True
    keeps_memory: bool = True

    def made(self, rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Model and optimizers. Worker 0's weights count."""
        m = self.model()
        with torch.no_grad():
            for p in m.parameters():
                p.add_(rank)
        made = self.optimizers(m.parameters())
        return m, made if isinstance(made, list) else [made]

    def trains(self, loop: Loop) -> Norms:
        for i, batch in enumerate(models.batches("mlp", loop.rank, STEPS)):
            self.step(loop, batch, i)
            for o in loop.all if self.zeroes else []:
                o.zero_grad(set_to_none=i % 2 == 0 or not self.keeps_memory)
        return loop.norms


def on_paraft(cases: Mapping[str, Case], out: str, fleets: dict[str, list[str]], apply: str, scales: float = 1.0) -> dict[str, Norms]:
    """A worker that trains all cases, each on servers of its own. Rank 1's GradScaler begins with ``scales`` times rank 0's scale."""
    norms = {}
    for name, servers in fleets.items():
        case = cases[name]
        run = paraft.init(servers=servers, settings=SMALL_BUCKETS)
        m, all_of = case.made(run.rank)
        run.prepare(m, all_of if len(all_of) > 1 else all_of[0], apply=apply, overlap=True if case.early else None)
        norms[name] = case.trains(Loop(m, m, all_of, run.no_sync, run.rank, 2.0**10 * scales**run.rank))
        run.finish()
        torch.save(m.state_dict(), f"{out}/{name} {run.rank}.pt")
    return norms


def on_ddp(cases: Mapping[str, Case], out: str) -> dict[str, Norms]:
    """The same under DDP."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    norms = {}
    for name, case in cases.items():
        m, all_of = case.made(rank)
        ddp = nn.parallel.DistributedDataParallel(m, find_unused_parameters=case.some_unused)
        norms[name] = case.trains(Loop(ddp, m, all_of, ddp.no_sync, rank, 2.0**10))
        torch.save(m.state_dict(), f"{out}/{name} ddp.pt")
    torch.distributed.destroy_process_group()
    return norms


def compare(cases: Mapping[str, Case], ours: Any, theirs: Any, start_fleet: Any, run_workers: Any, out: Path, scales: float = 1.0) -> None:
    """Two workers of each end with the same weights, and have seen the same norms and scales."""
    fleets = {name: start_fleet(case.servers).servers for name, case in cases.items()}
    our_norms = run_workers(None, ours, 2, str(out), fleets, timeout=400).values
    their_norms = run_workers(None, theirs, 2, str(out), timeout=400).values
    far = {}
    for name, case in cases.items():
        first, other, ddps = [torch.load(f"{out}/{name} {who}.pt") for who in ("0", "1", "ddp")]
        assert all(torch.equal(first[k], other[k]) for k in first), f"{name}: both end with the same"
        far[name] = apart(first, ddps) / case.within
        if "scaled" in name:
            our_norms[1][name] = [n / scales if n == int(n) and n > 0 else n for n in our_norms[1][name]]  # its scale
        for rank in (0, 1):
            assert our_norms[rank][name] == pytest.approx(their_norms[rank][name], rel=1e-5), f"{name}: norms and scales of rank {rank}"
    assert all(f <= 1 for f in far.values()), far
