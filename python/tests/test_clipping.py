"""Clipping behind ``backward()`` where the servers run the optimizer: as under DDP."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import loops  # noqa: E402
import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from loops import Case, Loop, Norms, momentum  # noqa: E402
from models import SMALL_BUCKETS, apart  # noqa: E402
from paraft.errors import MisuseError  # noqa: E402
from test_fleet import ask  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402


def in_two_calls(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    norm = nn.utils.get_total_norm([p.grad for p in loop.params()])
    nn.utils.clip_grads_with_norm_(loop.params(), 0.5, norm)
    loop.said(norm)
    loop.o.step()


def by_both(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    loop.said(clip_grad_norm_(loop.params(), math.inf))  # asks twice, as the Hugging Face Trainer does
    loop.said(clip_grad_norm_(loop.params(), 0.1))
    loop.o.step()


def now_and_then(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    if i % 3 == 0:
        loop.said(clip_grad_norm_(loop.params(), 0.05))
    loop.o.step()


def twice(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    for bound in (0.05, 10.0) if i % 2 else (0.1, math.inf):
        clip_grad_norm_(loop.params(), bound)
    loop.o.step()
    if i == 3:
        clip_grad_norm_(loop.params(), math.inf)  # of what is stepped: no one's business


def by_value_twice(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    nn.utils.clip_grad_value_(loop.params(), 0.01)
    nn.utils.clip_grad_value_(loop.params(), 0.05)
    loop.o.step()


def one_is_infinite(loop: Loop, batch: models.Batch, i: int) -> None:
    loss = models.loss(loop.forward, batch)
    (loss * math.inf if i == 4 and loop.rank == 1 else loss).backward()
    norm = clip_grad_norm_(loop.params(), 0.1)
    assert bool(norm.isfinite()) == (i != 4), f"step {i} of rank {loop.rank}: {norm}"
    if i != 4:
        loop.o.step()


def one_matrix() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(20, 10, bias=False)


def adam(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, lr=1e-3, eps=1e-4)


CASES: dict[str, Case] = {
    "by norm": Case(loops.by_norm, momentum, within=1e-6),
    "by norm, three servers": Case(loops.by_norm, adam, 3, 1e-5),
    "by norm, pushed early": Case(loops.by_norm, momentum, 3, 1e-6, early=True),
    "by value": Case(loops.by_value, momentum, within=1e-6),
    "by value, pushed early": Case(loops.by_value, momentum, 3, 1e-6, early=True),
    "in two calls": Case(in_two_calls, momentum, within=1e-6),
    "by both": Case(by_both, momentum, 3, 1e-6),
    "now and then, pushed early": Case(now_and_then, momentum, 3, 1e-6, early=True),
    "accumulated": Case(loops.accumulated, momentum, within=1e-6),
    "in a closure": Case(loops.in_a_closure, momentum, within=1e-6, zeroes=False),
    "twice": Case(twice, momentum, within=1e-6),
    "twice, pushed early": Case(twice, momentum, 3, 1e-6, early=True),
    "by value, twice": Case(by_value_twice, momentum, within=1e-6),
    "one is infinite": Case(one_is_infinite, momentum, within=1e-6),
    "one is infinite, pushed early": Case(one_is_infinite, momentum, 3, 1e-6, early=True),
    "one matrix": Case(loops.by_norm, momentum, within=1e-6, model=one_matrix, keeps_memory=False),  # its memory is used again
    "scaled": Case(loops.scaled, momentum, 3, 1e-6),
    "scaled alone": Case(loops.scaled_alone, momentum, within=1e-6),
}
if not hasattr(nn.utils, "get_total_norm"):  # new in torch 2.6
    del CASES["in two calls"]


def on_paraft(out: str, fleets: dict[str, list[str]]) -> dict[str, Norms]:
    return loops.on_paraft(CASES, out, fleets, "servers")


def on_ddp(out: str) -> dict[str, Norms]:
    return loops.on_ddp(CASES, out)


def test_what_the_script_clips_is_the_mean_as_ddps(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    loops.compare(CASES, on_paraft, on_ddp, start_fleet, run_workers, tmp_path)


def clips_slowly(out: str, servers: list[str], mode: str) -> list[str]:
    run = paraft.init(servers=servers, settings=SMALL_BUCKETS, mode=mode)
    m, (o,) = CASES["by norm"].made(run.rank)
    run.prepare(m, o, overlap=True)
    modes = []
    batches = list(models.batches("mlp", run.rank, 10))
    while run.step < 100:
        models.loss(m, batches[run.step % 10]).backward()
        clip_grad_norm_(m.parameters(), 0.1)
        o.step()
        o.zero_grad()
        modes.append(run.mode)
        print("step", run.step, flush=True)
        time.sleep(0.02)
    run.finish()
    torch.save(m.state_dict(), f"{out}/{run.rank}.pt")
    return modes


def test_a_clipped_run_survives_a_server_and_a_worker(start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    workers = start_workers(None, clips_slowly, 2, str(tmp_path), fleet.servers, "bsp")
    workers[0].wait_for("step 20")
    fleet._processes[0].kill()
    workers[0].wait_for("step 50")
    workers[1].kill()
    assert workers[0].wait() == 0, workers[0].said()


def test_a_clipped_run_switches_its_mode(start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    workers = start_workers(None, clips_slowly, 2, str(tmp_path), fleet.servers, "bsp")
    for step, mode in ((20, "asp"), (60, "bsp")):
        workers[0].wait_for(f"step {step}")
        ask(fleet, "mode", "paraft", mode)
    workers.wait(120)
    for modes in workers.values:
        assert modes[0] == "bsp" and "asp" in modes and modes[-1] == "bsp"


def test_a_worker_clips_its_own_gradient_in_asynchronous_mode(fleet: Any) -> None:
    run = paraft.init(fleet, mode="asp")
    (m, (o,)), (plain, (po,)) = CASES["by norm"].made(0), CASES["by norm"].made(0)
    run.prepare(m, o, apply="servers")
    for batch in models.batches("mlp", 0, 10):
        for model, optimizer in ((m, o), (plain, po)):
            models.loss(model, batch).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    run.finish()
    assert apart(m.state_dict(), plain.state_dict()) < 1e-6


def test_what_the_servers_cannot_clip_is_said_at_that_line(fleet: Any) -> None:
    run = paraft.init(fleet)
    m, (o,) = CASES["by norm"].made(0)
    run.prepare(m, o, apply="servers")

    def backward() -> None:
        o.zero_grad()
        models.loss(m, next(models.batches("mlp", 0, 1))).backward()

    backward()
    with pytest.raises(MisuseError, match="of type 2; prepare.*apply=\"mean\""):
        clip_grad_norm_(m.parameters(), 1.0, norm_type=1.0)
    with pytest.raises(MisuseError, match="of some parameters, without `2.bias`"):
        clip_grad_norm_(list(m.parameters())[:-1], 1.0)
    with pytest.raises(MisuseError, match="above 0"):
        clip_grad_norm_(m.parameters(), 0.0)
    nn.utils.clip_grad_value_(m.parameters(), 0.1)
    with pytest.raises(MisuseError, match="behind clip_grad_value_"):
        clip_grad_norm_(m.parameters(), 1.0)
    o.step()
    backward()
    clip_grad_norm_(m.parameters(), 1.0)
    with pytest.raises(MisuseError, match="optimizer.step\\(\\) did not follow"):
        backward()
    with pytest.raises(MisuseError, match="optimizer.step\\(\\) did not follow"):
        o.step()
    run.close()


def test_an_infinite_gradient_is_seen_by_the_script(fleet: Any) -> None:
    run = paraft.init(fleet)
    m, (o,) = CASES["by norm"].made(0)
    run.prepare(m, o, apply="servers")
    before = {k: v.clone() for k, v in m.state_dict().items()}
    batch = next(models.batches("mlp", 0, 1))
    (models.loss(m, batch) * math.inf).backward()
    norm = clip_grad_norm_(m.parameters(), 1.0)
    assert not norm.isfinite()  # the script makes no step
    o.zero_grad()
    assert all(torch.equal(before[k], v) for k, v in m.state_dict().items())
    models.loss(m, batch).backward()
    assert clip_grad_norm_(m.parameters(), 0.1).isfinite()
    o.step()
    assert any(not torch.equal(before[k], v) for k, v in m.state_dict().items())
    run.finish()
