"""``apply="mean"``: any optimizer on the mean gradient gives DDP's weights, whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from models import SMALL_BUCKETS, apart  # noqa: E402
from paraft.errors import ConfigError, MisuseError  # noqa: E402
from paraft.torch._state import State, Uncarried  # noqa: E402
from torch import nn  # noqa: E402

STEPS = 50


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["exp_avg"] * one + p.grad * (1 - one)).sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(two).add_(p.grad, alpha=1 - two)


class Muon(torch.optim.Optimizer):
    """Jordan et al., "Muon", 2024: momentum, made orthogonal where it is a matrix. Its state has a list, numbers of Python, and
    doubles, and its groups count the steps."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["made"] = group.get("made", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(buffers=[torch.zeros_like(p)], steps=0, seen=False, norm=torch.zeros((), dtype=torch.float64))
                (buffer,) = state["buffers"]
                buffer.mul_(group["momentum"]).add_(p.grad)
                state["steps"] += 1
                state["seen"] = True
                state["norm"] += p.grad.double().norm()
                update = p.grad.add(buffer, alpha=group["momentum"])
                if p.ndim == 2:
                    x = update / (update.norm() + 1e-7)
                    for _ in range(5):
                        a = x @ x.T
                        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                    update = x
                # What a worker that came back must know, too.
                scale = 1.0 / (1.0 + 1e-3 * state["steps"] + 1e-3 * group["made"] + 1e-6 * float(state["norm"]))
                p.add_(update, alpha=-group["lr"] * scale)


#: Each with the name of its model.
OPTIMIZERS: dict[str, tuple[str, Any]] = {
    "lion": ("mlp", Lion),
    "muon": ("mlp", Muon),
    "torch's muon": ("matrices", lambda p: torch.optim.Muon(p, lr=0.02)),
    "adafactor": ("mlp", lambda p: torch.optim.Adafactor(p, lr=0.02)),
    "asgd": ("mlp", lambda p: torch.optim.ASGD(p, lr=0.05, t0=10)),
    "rprop": ("mlp", lambda p: torch.optim.Rprop(p, lr=1e-3)),
    "amsgrad": ("mlp", lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True)),
    "tensor rate": ("mlp", lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), amsgrad=True)),
    "conv": ("conv", lambda p: torch.optim.Rprop(p, lr=1e-3)),
    "clipped": ("mlp", Lion),
    **{name: ("mlp", make) for name, (make, _) in models.OPTIMIZERS.items()},
}
# Torch has Adafactor since 2.5, and Muon since 2.9.
for _case, _class in (("adafactor", "Adafactor"), ("torch's muon", "Muon")):
    if not hasattr(torch.optim, _class):
        del OPTIMIZERS[_case]
#: The norm at which the mean is clipped.
CLIP = 0.1


def made(case: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    kind, make = OPTIMIZERS[case]
    if kind == "matrices":
        torch.manual_seed(seed)
        m: nn.Module = nn.Sequential(nn.Linear(20, 64, bias=False), nn.ReLU(), nn.Linear(64, 10, bias=False))
    else:
        m = models.model(kind, seed)
    return m, make(m.parameters())


def batches(case: str, rank: int, steps: int = STEPS) -> list[models.Batch]:
    kind = OPTIMIZERS[case][0]
    return list(models.batches("mlp" if kind == "matrices" else kind, rank, steps))


def trained(out: str, fleets: dict[str, list[str]]) -> list[str]:
    """A worker that trains all cases, each on servers of its own; how each is applied."""
    how = []
    for case, servers in fleets.items():
        run = paraft.init(servers=servers, settings=SMALL_BUCKETS)
        m, o = made(case, run.rank)  # worker 0's count
        run.prepare(m, o, apply="mean" if case in (*models.OPTIMIZERS, "amsgrad", "tensor rate") else "auto", clip_norm=CLIP if case == "clipped" else None)
        how.append(type(run._front()).__name__)
        for batch in batches(case, run.rank):
            models.loss(m, batch).backward()
            o.step()
            o.zero_grad()
        run.finish()
        torch.save(m.state_dict(), f"{out}/{case} {run.rank}.pt")
    return how


def trained_by_ddp(out: str) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for case in OPTIMIZERS:
        m, o = made(case, rank)
        ddp = nn.parallel.DistributedDataParallel(m, broadcast_buffers=False)
        for batch in batches(case, rank):
            models.loss(ddp, batch).backward()
            if case == "clipped":
                nn.utils.clip_grad_norm_(m.parameters(), CLIP)
            o.step()
            o.zero_grad()
        torch.save(m.state_dict(), f"{out}/{case} ddp-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_every_optimizer_on_the_mean_gives_ddps_weights(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    out = str(tmp_path)
    fleets = {case: start_fleet(1).servers for case in OPTIMIZERS}
    how = run_workers(None, trained, 2, out, fleets, timeout=400).values
    assert set(how[0]) == {"OnMean"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_workers(None, trained_by_ddp, 2, out, env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, timeout=400)
    far = {}
    for case in OPTIMIZERS:
        ours, other, theirs = [torch.load(f"{out}/{case} {who}.pt") for who in ("0", "1", "ddp-0")]
        assert all(torch.equal(ours[k], other[k]) for k in ours if "num_batches" not in k), f"{case}: both end with the same"
        far[case] = apart(ours, theirs)
    # clip_grad_norm_ divides by the norm plus 1e-6, and Lion looks at signs.
    assert all(f <= (1e-2 if case == "clipped" else 2e-7) for case, f in far.items()), far


def alone(case: str, steps: int) -> dict[str, Any]:
    """What one process gets of the batches that all workers have."""
    m, o = made(case)
    for batch in batches(case, 0, steps):
        models.loss(m, batch).backward()
        o.step()
        o.zero_grad()
    return m.state_dict()


def trained_through_faults(case: str, out: str, servers: list[str], until: int, dies: bool, resume: Optional[str], workers: int) -> int:
    """A worker whose batches are those of all. It dies when it has made step 20, before it has written its share of it."""
    settings = {**SMALL_BUCKETS, "checkpoint.dir": f"{out}/checkpoints"}
    run = paraft.init(servers=servers, workers=workers, settings=settings, resume=resume)
    m, o = made(case, run.rank)
    run.prepare(m, o, apply="mean")
    began, all_batches = run.step, batches(case, 0)
    print(f"began at {began}", flush=True)
    front = run._front()
    gather = front._state.gather

    def gathers(into: torch.Tensor) -> None:
        if dies and run.rank == 1 and run.step == 19:
            os.kill(os.getpid(), signal.SIGKILL)
        gather(into)

    front._state.gather = gathers
    while run.step < until:
        for step, name in ((25, "is-back"), (30, "is-killed")):
            if run.rank == 0 and run.step == step:
                print(f"is at {step}", flush=True)
                while not os.path.exists(f"{out}/{name}"):
                    time.sleep(0.01)
        models.loss(m, all_batches[run.step]).backward()
        o.step()
        o.zero_grad()
    if until < STEPS:
        if run.rank == 0:
            torch.save(m.state_dict(), f"{out}/{case} at {until}.pt")
        run.save()
    run.finish()
    torch.save(m.state_dict(), f"{out}/{case} {run.rank} of {workers}.pt")
    return began


DIES = ["lion", "muon", "torch's muon", "adafactor", "asgd", "rprop", "amsgrad", "sgd", "adagrad", "nadam"]


@pytest.mark.parametrize("case", [case for case in DIES if case in OPTIMIZERS])
def test_weights_stay_the_same_whatever_dies(case: str, start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    args = [case, str(tmp_path), fleet.servers, 40]
    workers = start_workers(fleet, trained_through_faults, 2, *args, True, None, 2)
    assert workers[1].wait() != 0, "it was killed"
    workers[0].wait_for("is at 25")
    back = start_workers(fleet, trained_through_faults, 1, *args, False, None, 2, env={"PARAFT_RANK": "1", "RANK": "1"})
    back[0].wait_for("began at")
    (tmp_path / "is-back").touch()
    workers[0].wait_for("is at 30")
    (tmp_path / "is-killed").touch()
    fleet._processes[0].kill()
    assert workers[0].wait() == 0 and back[0].wait() == 0, workers[0].said() + back[0].said()
    assert back[0].value == 25
    half = alone(case, 40)
    ours, other = torch.load(tmp_path / f"{case} at 40.pt"), torch.load(tmp_path / f"{case} 1 of 2.pt")
    assert all(torch.equal(half[k], ours[k]) and torch.equal(half[k], other[k]) for k in half), "the bits of one process"
    second = start_fleet(1)
    more = start_workers(second, trained_through_faults, 3, case, str(tmp_path), second.servers, STEPS, False, str(tmp_path / "checkpoints"), 3)
    more.wait()
    assert more.values == [40, 40, 40]
    whole, first = alone(case, STEPS), torch.load(tmp_path / f"{case} 0 of 3.pt")
    for rank in (1, 2):
        its = torch.load(tmp_path / f"{case} {rank} of 3.pt")
        assert all(torch.equal(first[k], its[k]) for k in first)
    # The mean of three equal gradients differs by a last bit from one of them, and Rprop and Lion look at signs.
    assert apart(first, whole) <= 1e-5


def dies_while_writing(out: str, servers: list[str]) -> None:
    """A worker whose results are never written by rank 0; rank 1 says when it has written its own."""
    run = paraft.init(servers=servers, settings={**SMALL_BUCKETS, "cluster.grace_ms": 20_000})
    m, o = made("lion")
    run.prepare(m, o)
    front, all_batches = run._front(), batches("lion", 0)
    gather = front._state.gather

    def gathers(into: torch.Tensor) -> None:
        if run.step == 4 and run.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        gather(into)
        if run.step == 4:
            threading.Timer(3.0, lambda: print("has written", flush=True)).start()

    front._state.gather = gathers
    while run.step < 10:
        models.loss(m, all_batches[run.step]).backward()
        o.step()
        o.zero_grad()


def test_workers_that_all_die_while_they_write_must_resume(start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(1)
    workers = start_workers(fleet, dies_while_writing, 2, str(tmp_path), fleet.servers)
    assert workers[0].wait() != 0
    workers[1].wait_for("has written")
    workers[1].kill()
    again = start_workers(fleet, dies_while_writing, 2, str(tmp_path), fleet.servers)
    assert [w.wait() for w in again] != [0, 0]
    assert all("Resume from a checkpoint" in w.err for w in again), [w.said() for w in again]


def test_a_gradient_that_is_not_finite_skips_the_step(fleet: Any) -> None:
    run = paraft.init(fleet, settings=SMALL_BUCKETS)
    (m, o), (plain, po) = made("muon"), made("muon")
    run.prepare(m, o)
    for i, batch in enumerate(batches("muon", 0, 10)):
        (models.loss(m, batch) * (float("inf") if i == 4 else 1.0)).backward()
        if i == 4:
            with pytest.raises(paraft.DivergedError):
                o.step()
        else:
            o.step()
            models.loss(plain, batch).backward()
            po.step()
        o.zero_grad()
        po.zero_grad()
    run.finish()
    assert all(torch.equal(a, b) for a, b in zip(m.parameters(), plain.parameters()))
    assert all(o.state[a]["steps"] == 9 for a in m.parameters())


def test_what_cannot_be_the_mean_is_said(start_fleet: Any) -> None:
    m, o = made("lion")
    for settings, mode, why in (({}, "asp", "only in mode bsp"), ({"train.backup_workers": 1, "train.workers": 3}, None, "without backup workers")):
        run = paraft.init(servers="127.0.0.1:1", settings=settings, mode=mode)
        with pytest.raises(ConfigError, match=why):
            run.prepare(m, o, apply="mean")
    run = paraft.init(servers="127.0.0.1:1")
    with pytest.raises(ConfigError, match="closure"):
        run.prepare(m, torch.optim.LBFGS(m.parameters()), apply="mean")
    with pytest.raises(ConfigError, match="constraints"):
        run.prepare(m, o, apply="mean", constraints={"0.weight": paraft.clamp(0, 1)})
    run = paraft.init(start_fleet(1))
    run.prepare(m, o)
    with torch.no_grad():
        m[0].weight.clamp_(-0.01, 0.01)
    models.loss(m, batches("lion", 0, 1)[0]).backward()
    with pytest.raises(MisuseError, match="0.weight"):
        o.step()
    run.close()


class Grows(Lion):
    """Keeps every gradient."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("all", []).append(p.grad)


class Counts(Lion):
    """Keeps a number that no state_dict() has."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.made = 0

    def step(self, closure: Any = None) -> None:
        self.made += 1


@pytest.mark.parametrize(("kind", "why"), [(Grows, "changes its form"), (Counts, "`made`"), (torch.optim.SparseAdam, "dense gradients")])
def test_state_without_a_fixed_form_is_refused(kind: Any, why: str) -> None:
    m = models.model("mlp")
    with pytest.raises(Uncarried, match=why):
        State(kind(m.parameters()), list(m.parameters()))
