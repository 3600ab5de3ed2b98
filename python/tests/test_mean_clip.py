"""``apply="mean"``: the gradients that a script clips, unscales or changes between ``backward()`` and ``step()`` are the mean, as
behind DDP's ``backward()``."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import clip_grad_norm_  # noqa: E402  (before paraft, as many scripts)

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from paraft.errors import MisuseError  # noqa: E402
from test_mean import SMALL_BUCKETS, Lion, apart  # noqa: E402
from torch import nn  # noqa: E402

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
    """What a script has, on DDP and on Paraft alike."""

    def __init__(self, forward: nn.Module, m: nn.Module, o: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int, scale: float) -> None:
        self.forward, self.m, self.o, self.no_sync, self.rank = forward, m, o, no_sync, rank
        self.noise = torch.Generator().manual_seed(5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
        self.norms: Norms = []

    def params(self) -> list[Any]:
        return list(self.m.parameters())

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
        loop.scaler.unscale_(loop.o)
        norm = clip_grad_norm_(loop.params(), 0.1)
        loop.said(norm if norm.isfinite() else torch.tensor(-1.0))
    loop.scaler.step(loop.o)
    loop.scaler.update()
    loop.norms.append(loop.scaler.get_scale())


def scaled_alone(loop: Loop, batch: models.Batch, i: int) -> None:
    scaled(loop, batch, i, unscales=False)


def amsgrad(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, lr=1e-3, amsgrad=True)


def momentum(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.1, momentum=0.9)


#: A step, and the optimizer.
CASES: dict[str, tuple[Callable[[Loop, models.Batch, int], None], Any]] = {
    "by norm": (by_norm, momentum),
    "by norm, pushed early": (by_norm, momentum),
    "by inf norm": (by_inf_norm, amsgrad),
    "by value": (by_value, momentum),
    "per module": (per_module, momentum),
    "in two calls": (in_two_calls, momentum),
    "with noise": (with_noise, amsgrad),
    "accumulated": (accumulated, Lion),
    "in a closure": (in_a_closure, momentum),
    "left out": (left_out, amsgrad),
    "of some": (of_some, momentum),
    "scaled": (scaled, amsgrad),
    "scaled alone": (scaled_alone, momentum),
    "scaled, fused": (scaled, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
}
if not hasattr(nn.utils, "get_total_norm"):  # new in torch 2.6
    del CASES["in two calls"]


def trains(case: str, loop: Loop) -> Norms:
    step, _ = CASES[case]
    for i, batch in enumerate(models.batches("mlp", loop.rank, STEPS)):
        step(loop, batch, i)
        if case != "in a closure":
            loop.o.zero_grad(set_to_none=i % 2 == 0)
    return loop.norms


def made(case: str, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    m = Branches() if case == "of some" else models.model("mlp", rank)
    return m, CASES[case][1](m.parameters())


def on_paraft(out: str, fleets: dict[str, list[str]]) -> dict[str, Norms]:
    norms = {}
    for case, servers in fleets.items():
        run = paraft.init(servers=servers, settings=SMALL_BUCKETS)
        m, o = made(case, run.rank)
        run.prepare(m, o, apply="mean", overlap=True if "early" in case else None)
        # Rank 1's scale is another one, as that of a worker that came back.
        norms[case] = trains(case, Loop(m, m, o, run.no_sync, run.rank, 2.0 ** (10 + 2 * run.rank)))
        run.finish()
        torch.save(m.state_dict(), f"{out}/{case} {run.rank}.pt")
    return norms


def on_ddp(out: str) -> dict[str, Norms]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    norms = {}
    for case in CASES:
        m, o = made(case, rank)
        ddp = nn.parallel.DistributedDataParallel(m, find_unused_parameters=case == "of some")
        norms[case] = trains(case, Loop(ddp, m, o, ddp.no_sync, rank, 2.0**10))
        torch.save(m.state_dict(), f"{out}/{case} ddp-{rank}.pt")
    torch.distributed.destroy_process_group()
    return norms


def test_what_the_script_clips_is_the_mean_as_ddps(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    out = str(tmp_path)
    ours = run_workers(None, on_paraft, 2, out, {case: start_fleet(1).servers for case in CASES}, timeout=400).values
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    theirs = run_workers(None, on_ddp, 2, out, env=env, timeout=400).values
    far = {}
    for case in CASES:
        first, other, ddps = [torch.load(f"{out}/{case} {who}.pt") for who in ("0", "1", "ddp-0")]
        assert all(torch.equal(first[k], other[k]) for k in first), f"{case}: both end with the same"
        far[case] = apart(first, ddps)
        if "scaled" in case:
            ours[1][case] = [n / 4 if n == int(n) and n > 0 else n for n in ours[1][case]]  # its scale
        for rank in (0, 1):
            assert ours[rank][case] == pytest.approx(theirs[rank][case], rel=1e-6), f"{case}: norms and scales of rank {rank}"
    assert all(f <= 2e-7 for f in far.values()), far


def alone(steps: int) -> dict[str, Any]:
    """What one process gets of the batches that all workers have."""
    m, o = made("by inf norm", 0)
    for batch in models.batches("mlp", 0, steps):
        models.loss(m, batch).backward()
        clip_grad_norm_(m.parameters(), 0.1)
        o.step()
        o.zero_grad()
    return m.state_dict()


def clips_through_faults(out: str, servers: list[str], dies: bool) -> Optional[int]:
    """A worker whose batches are those of all. Rank 1 dies between clipping and step 10; rank 0's wait is interrupted in step 15."""
    run = paraft.init(servers=servers, workers=2, settings=SMALL_BUCKETS)
    m, o = made("by inf norm", run.rank)
    run.prepare(m, o, apply="mean")
    began, all_batches = run.step, list(models.batches("mlp", 0, STEPS))
    print(f"began at {began}", flush=True)
    while run.step < STEPS:
        step = run.step + 1
        if run.rank == 0 and step == 12:
            print("is at 12", flush=True)
            while not os.path.exists(f"{out}/is-back"):
                time.sleep(0.01)
        models.loss(m, all_batches[run.step]).backward()
        if step == 15 and run.rank == 1:
            while not os.path.exists(f"{out}/was-interrupted"):
                time.sleep(0.01)
        if step == 15 and run.rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                clip_grad_norm_(m.parameters(), 0.1)
            Path(f"{out}/was-interrupted").touch()
            with pytest.raises(MisuseError, match="make the call again"):
                o.step()
            o.zero_grad()
        clip_grad_norm_(m.parameters(), 0.1)
        if dies and run.rank == 1 and step == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        o.step()
        o.zero_grad()
    run.finish()
    torch.save(m.state_dict(), f"{out}/{run.rank}.pt")
    return began


def test_a_clipped_step_survives_a_death_and_an_interrupt(start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    workers = start_workers(fleet, clips_through_faults, 2, str(tmp_path), fleet.servers, True)
    assert workers[1].wait() != 0, "it was killed"
    workers[0].wait_for("is at 12")
    back = start_workers(fleet, clips_through_faults, 1, str(tmp_path), fleet.servers, False, env={"PARAFT_RANK": "1", "RANK": "1"})
    back[0].wait_for("began at")
    (tmp_path / "is-back").touch()
    assert workers[0].wait() == 0 and back[0].wait() == 0, workers[0].said() + back[0].said()
    whole = alone(STEPS)
    for rank in (0, 1):
        its = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(whole[k], its[k]) for k in whole), f"rank {rank} has the bits of one process"


def test_what_does_not_fit_between_clip_and_step_is_said(fleet: paraft.Fleet, tmp_path: Path) -> None:
    run = paraft.init(fleet, settings={**SMALL_BUCKETS, "checkpoint.dir": str(tmp_path)})
    m, o = made("by norm", 0)
    run.prepare(m, o, apply="mean")
    some = list(models.batches("mlp", 0, 3))
    models.loss(m, some[0]).backward()
    clip_grad_norm_(m.parameters(), 0.1)
    with pytest.raises(MisuseError, match=r"run.save\(\) between"):
        run.save()
    with pytest.raises(MisuseError, match="backward pass has reached"):
        models.loss(m, some[1]).backward()
    o.step()
    assert run.step == 1
    models.loss(m, some[1]).backward()
    m[0].weight.grad.mul_(2.0)
    with pytest.raises(MisuseError, match=r"clip_grad_norm_\(model.parameters\(\), math.inf\)"):
        o.step()
    run.close()
    models.loss(m, some[2]).backward()
    assert clip_grad_norm_(m.parameters(), 0.1) > 0, "the model is torch's own again"


def test_an_infinite_gradient_is_seen_by_the_script(fleet: paraft.Fleet) -> None:
    run = paraft.init(fleet, settings=SMALL_BUCKETS)
    m, o = made("by norm", 0)
    run.prepare(m, o, apply="mean")
    before = [p.detach().clone() for p in m.parameters()]
    for skips in (False, True):
        (models.loss(m, next(models.batches("mlp", 0, 1))) * math.inf).backward()
        assert not clip_grad_norm_(m.parameters(), 0.1).isfinite()
        with contextlib.nullcontext() if skips else pytest.raises(paraft.DivergedError):
            if not skips:
                o.step()
        o.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(m.parameters(), before))
    models.loss(m, next(models.batches("mlp", 0, 1))).backward()
    o.step()
    assert run.step == 3
    run.finish()
