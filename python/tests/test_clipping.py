"""Clipping behind ``backward()`` where the servers run the optimizer: as under DDP."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
import test_mean_clip as loops  # noqa: E402
from paraft.errors import MisuseError  # noqa: E402
from test_fleet import ask  # noqa: E402
from test_mean import SMALL_BUCKETS, apart  # noqa: E402
from test_mean_clip import Loop, Norms, clip_grad_norm_  # noqa: E402
from torch import nn  # noqa: E402


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


def one_matrix(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Linear(20, 10, bias=False)


def adam(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, lr=1e-3, eps=1e-4)


#: A step, the optimizer, the number of servers, and how far the weights may be from DDP's.
CASES: dict[str, tuple[Callable[[Loop, models.Batch, int], None], Any, int, float]] = {
    "by norm": (loops.by_norm, loops.momentum, 1, 1e-6),
    "by norm, three servers": (loops.by_norm, adam, 3, 1e-5),
    "by norm, pushed early": (loops.by_norm, loops.momentum, 3, 1e-6),
    "by value": (loops.by_value, loops.momentum, 1, 1e-6),
    "by value, pushed early": (loops.by_value, loops.momentum, 3, 1e-6),
    "in two calls": (in_two_calls, loops.momentum, 1, 1e-6),
    "by both": (by_both, loops.momentum, 3, 1e-6),
    "now and then, pushed early": (now_and_then, loops.momentum, 3, 1e-6),
    "accumulated": (loops.accumulated, loops.momentum, 1, 1e-6),
    "in a closure": (loops.in_a_closure, loops.momentum, 1, 1e-6),
    "twice": (twice, loops.momentum, 1, 1e-6),
    "twice, pushed early": (twice, loops.momentum, 3, 1e-6),
    "by value, twice": (by_value_twice, loops.momentum, 1, 1e-6),
    "one is infinite": (one_is_infinite, loops.momentum, 1, 1e-6),
    "one is infinite, pushed early": (one_is_infinite, loops.momentum, 3, 1e-6),
    "one matrix": (loops.by_norm, loops.momentum, 1, 1e-6),
    "scaled": (loops.scaled, loops.momentum, 3, 1e-6),
}
if not hasattr(nn.utils, "get_total_norm"):  # new in torch 2.6
    del CASES["in two calls"]


def made(case: str, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    m = one_matrix(rank) if case == "one matrix" else models.model("mlp", rank)
    return m, CASES[case][1](m.parameters())


def trains(case: str, loop: Loop) -> Norms:
    for i, batch in enumerate(models.batches("mlp", loop.rank, loops.STEPS)):
        CASES[case][0](loop, batch, i)
        if case != "in a closure":
            loop.o.zero_grad(set_to_none=i % 2 == 0 or case == "one matrix")  # its memory is used again
    return loop.norms


def on_paraft(out: str, fleets: dict[str, list[str]]) -> dict[str, Norms]:
    norms = {}
    for case, servers in fleets.items():
        run = paraft.init(servers=servers, settings=SMALL_BUCKETS)
        m, o = made(case, run.rank)
        run.prepare(m, o, apply="servers", overlap=True if "early" in case else None)
        norms[case] = trains(case, Loop(m, m, o, run.no_sync, run.rank, 2.0**10))
        run.finish()
        torch.save(m.state_dict(), f"{out}/{case} {run.rank}.pt")
    return norms


def on_ddp(out: str) -> dict[str, Norms]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    norms = {}
    for case in CASES:
        m, o = made(case, rank)
        ddp = nn.parallel.DistributedDataParallel(m)
        norms[case] = trains(case, Loop(ddp, m, o, ddp.no_sync, rank, 2.0**10))
        torch.save(m.state_dict(), f"{out}/{case} ddp.pt")
    torch.distributed.destroy_process_group()
    return norms


def test_what_the_script_clips_is_the_mean_as_ddps(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    out = str(tmp_path)
    fleets = {case: start_fleet(servers).servers for case, (_, _, servers, _) in CASES.items()}
    ours = run_workers(None, on_paraft, 2, out, fleets, timeout=400).values
    theirs = run_workers(None, on_ddp, 2, out, timeout=400).values
    far = {}
    for case, (*_, within) in CASES.items():
        first, other, ddps = [torch.load(f"{out}/{case} {who}.pt") for who in ("0", "1", "ddp")]
        assert all(torch.equal(first[k], other[k]) for k in first), f"{case}: both end with the same"
        far[case] = apart(first, ddps) / within
        if case != "scaled":  # there each worker has its own scale
            for rank in (0, 1):
                assert ours[rank][case] == pytest.approx(theirs[rank][case], rel=1e-5), f"{case}: norms of rank {rank}"
    assert all(f <= 1 for f in far.values()), far


def clips_slowly(out: str, servers: list[str], mode: str) -> list[str]:
    run = paraft.init(servers=servers, settings=SMALL_BUCKETS, mode=mode)
    m, o = made("by norm", run.rank)
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
    (m, o), (plain, po) = made("by norm", 0), made("by norm", 0)
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
    m, o = made("by norm", 0)
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
    m, o = made("by norm", 0)
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
