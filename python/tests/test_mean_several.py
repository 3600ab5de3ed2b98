"""Several optimizers on the mean gradient: as Muon for the matrices and AdamW for the rest."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Optional

import pytest

torch = pytest.importorskip("torch")

import loops  # noqa: E402
import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
import test_mean  # noqa: E402
from loops import STEPS, Case, Loop, Norms  # noqa: E402
from models import SMALL_BUCKETS, apart  # noqa: E402
from paraft.errors import ConfigError, MisuseError  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402

#: Torch has Muon since 2.9.
Muon: Any = getattr(torch.optim, "Muon", test_mean.Muon)


def muon_and_adamw(params: Any) -> list[torch.optim.Optimizer]:
    given = list(params)
    return [Muon([p for p in given if p.ndim == 2], lr=0.02), torch.optim.AdamW([p for p in given if p.ndim != 2], lr=1e-3)]


def lion_and_momentum(params: Any) -> list[torch.optim.Optimizer]:
    first, *rest = params
    return [torch.optim.SGD(rest, lr=0.05, momentum=0.9), test_mean.Lion([first])]


def stepped(loop: Loop) -> None:
    for o in loop.all:
        o.step()


def plain(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    stepped(loop)


def clipped(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    loop.said(clip_grad_norm_(loop.params(), 0.1))
    stepped(loop)


def each_clipped(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    loop.said(clip_grad_norm_(loop.of(0), 0.1))
    loop.said(clip_grad_norm_(loop.of(1), 0.01))
    stepped(loop)


def one_by_one(loop: Loop, batch: models.Batch, i: int) -> None:
    loop.backward(batch)
    for place, bound in ((1, 0.01), (0, 0.1)):
        loop.said(clip_grad_norm_(loop.of(place), bound))
        loop.all[place].step()


def now_and_then(loop: Loop, batch: models.Batch, i: int) -> None:
    """One steps rarely, on gradients that add up, and another one twice on the same."""
    loop.backward(batch)
    loop.all[0].step()
    if i % 3 == 0:
        loop.all[0].step()
    if i % 2:
        loop.all[1].step()
    loop.all[0].zero_grad()
    if i % 2 == 0:
        x, y = batch
        loop.forward(x)  # a forward pass alone
        loop.backward((x.flip(0), y.flip(0)))
        loop.all[1].step()


def in_turn(loop: Loop, batch: models.Batch, i: int) -> None:
    """Each on a backward pass of its own, as of a GAN; what a frozen one has of before is not looked at."""
    own = loop.all[i % 2]
    for p in loop.of(1 - i % 2):
        p.requires_grad_(False)
    loop.backward(batch)
    own.step()
    for p in loop.of(1 - i % 2):
        p.requires_grad_(True)
    own.zero_grad()


def scaled_in_turn(loop: Loop, batch: models.Batch, i: int) -> None:
    """An infinity in the gradients of one, which stays there, is none of the other's."""
    own = loop.all[i % 2]
    own.zero_grad()
    for p in loop.of(1 - i % 2):
        p.requires_grad_(False)
    loss = models.loss(loop.forward, batch) * (float("inf") if i in loops.BURSTS and loop.rank == 1 else 1.0)
    loop.scaler.scale(loss).backward()
    for p in loop.of(1 - i % 2):
        p.requires_grad_(True)
    loop.scaler.step(own)
    loop.scaler.update()
    loop.norms.append(loop.scaler.get_scale())


def with_statistics() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


CASES: dict[str, Case] = {
    "plain": Case(plain, muon_and_adamw),
    "clipped": Case(clipped, muon_and_adamw),
    "each clipped": Case(each_clipped, muon_and_adamw),
    "one by one": Case(one_by_one, lion_and_momentum),
    "accumulated": Case(lambda loop, batch, i: (loops.accumulated(loop, batch, i), loop.all[1].step())[1], muon_and_adamw),
    "now and then": Case(now_and_then, lion_and_momentum),
    "with statistics": Case(plain, lion_and_momentum, model=with_statistics),
    "in turn": Case(in_turn, lion_and_momentum, some_unused=True, zeroes=False),
    "scaled": Case(loops.scaled, muon_and_adamw),
    "scaled alone": Case(loops.scaled_alone, lion_and_momentum),
    "scaled in turn": Case(scaled_in_turn, lion_and_momentum, some_unused=True, zeroes=False),
}


def on_paraft(out: str, fleets: dict[str, list[str]]) -> dict[str, Norms]:
    return loops.on_paraft(CASES, out, fleets, "auto", scales=4)


def on_ddp(out: str) -> dict[str, Norms]:
    return loops.on_ddp(CASES, out)


def test_several_optimizers_on_the_mean_are_ddps(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    loops.compare(CASES, on_paraft, on_ddp, start_fleet, run_workers, tmp_path, scales=4)


def alone(steps: int) -> dict[str, Any]:
    """What one process gets of the batches that all workers have."""
    m, all_of = CASES["plain"].made(0)
    for batch in models.batches("mlp", 0, steps):
        models.loss(m, batch).backward()
        for o in all_of:
            o.step()
            o.zero_grad()
    return m.state_dict()


def trains_through_faults(out: str, servers: list[str], until: int, dies: bool, resume: Optional[str], workers: int) -> int:
    """A worker whose batches are those of all. Rank 1 dies between the two optimizers' part of step 10."""
    settings = {**SMALL_BUCKETS, "checkpoint.dir": f"{out}/checkpoints"}
    run = paraft.init(servers=servers, workers=workers, settings=settings, resume=resume)
    m, all_of = CASES["plain"].made(run.rank)
    run.prepare(m, all_of)
    began, all_batches = run.step, list(models.batches("mlp", 0, STEPS))
    print(f"began at {began}", flush=True)
    while run.step < until:
        if run.rank == 0 and run.step == 12 and workers == 2:
            print("is at 12", flush=True)
            while not os.path.exists(f"{out}/is-back"):
                time.sleep(0.01)
        models.loss(m, all_batches[run.step]).backward()
        all_of[0].step()
        if dies and run.rank == 1 and run.step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        all_of[1].step()
        for o in all_of:
            o.zero_grad()
    if until < STEPS:
        run.save()
    run.finish()
    torch.save(m.state_dict(), f"{out}/{run.rank} at {until}.pt")
    return began


def test_several_on_the_mean_survive_deaths_and_resume(start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    out, fleet = str(tmp_path), start_fleet(3)
    workers = start_workers(fleet, trains_through_faults, 2, out, fleet.servers, 20, True, None, 2)
    assert workers[1].wait() != 0, "it was killed"
    workers[0].wait_for("is at 12")
    back = start_workers(fleet, trains_through_faults, 1, out, fleet.servers, 20, False, None, 2, env={"PARAFT_RANK": "1", "RANK": "1"})
    back[0].wait_for("began at")
    fleet._processes[0].kill()
    (tmp_path / "is-back").touch()
    assert workers[0].wait() == 0 and back[0].wait() == 0, workers[0].said() + back[0].said()
    assert back[0].value == 12
    half = alone(20)
    for rank in (0, 1):
        its = torch.load(f"{out}/{rank} at 20.pt")
        assert all(torch.equal(half[k], its[k]) for k in half), f"rank {rank} has the bits of one process"
    second = start_fleet(1)
    more = start_workers(second, trains_through_faults, 3, out, second.servers, STEPS, False, f"{out}/checkpoints", 3).wait()
    assert more.values == [20, 20, 20]
    first, *others = [torch.load(f"{out}/{rank} at {STEPS}.pt") for rank in range(3)]
    assert all(torch.equal(first[k], its[k]) for its in others for k in first)
    # The mean of three equal gradients differs by a last bit from one of them.
    assert apart(first, alone(STEPS)) <= 1e-5


def test_a_mean_that_several_step_on_is_one_step(fleet: Any, tmp_path: Path) -> None:
    run = paraft.init(fleet, settings={**SMALL_BUCKETS, "checkpoint.dir": str(tmp_path)})
    m, all_of = CASES["plain"].made(0)
    run.prepare(m, all_of)
    batch = next(models.batches("mlp", 0, 1))
    models.loss(m, batch).backward()
    all_of[1].step()
    assert run.step == 0
    all_of[0].step()
    assert run.step == 1
    models.loss(m, batch).backward()
    all_of[0].step()
    run.save()
    assert run.step == 2, "a checkpoint has what was stepped"
    with torch.no_grad():
        models.loss(m, batch)
    models.loss(m, batch).backward()
    all_of[0].step()
    run.finish()
    assert run.step == 3


def test_statistics_are_kept_between_steps_of_one_alone(fleet: Any) -> None:
    ours, plain_torch = [CASES["with statistics"].made(0) for _ in range(2)]
    run = paraft.init(fleet, settings=SMALL_BUCKETS)
    run.prepare(*ours)
    for i, batch in enumerate(models.batches("mlp", 0, 10)):
        for m, all_of in (ours, plain_torch):
            models.loss(m, batch).backward()
            all_of[i % 2].step()
            for o in all_of:
                o.zero_grad()
    run.finish()
    theirs = plain_torch[0].state_dict()
    assert all(torch.allclose(value, theirs[name], atol=1e-6) for name, value in ours[0].state_dict().items())


def test_what_several_on_the_mean_cannot_is_said(fleet: Any) -> None:
    m, all_of = CASES["plain"].made(0)
    run = paraft.init(servers="127.0.0.1:1", mode="asp")
    with pytest.raises(ConfigError, match="Muon is none of the servers'.*only in mode bsp"):
        run.prepare(m, all_of)
    run = paraft.init(servers="127.0.0.1:1")
    with pytest.raises(ConfigError, match="apply cannot be \"worker\""):
        run.prepare(m, all_of, apply="worker")
    with pytest.raises(ConfigError, match="or prepare.*apply=\"mean\""):
        run.prepare(m, all_of, apply="servers")
    with pytest.raises(ConfigError, match="clip_norm: with several"):
        run.prepare(m, all_of, clip_norm=1.0)
    with pytest.raises(ConfigError, match="state of LBFGS|LBFGS.*closure"):
        run.prepare(m, [all_of[0], torch.optim.LBFGS(all_of[1].param_groups[0]["params"])])
    run = paraft.init(fleet)
    run.prepare(m, all_of)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    batch = next(models.batches("mlp", 0, 1))
    scaler.scale(models.loss(m, batch)).backward()
    clip_grad_norm_(m.parameters(), 0.1)
    with pytest.raises(MisuseError, match="call scaler.unscale_"):
        scaler.step(all_of[0])
    models.loss(m, batch).backward()
    scaler.unscale_(all_of[0])
    with pytest.raises(MisuseError, match="another optimizer's GradScaler"):
        all_of[1].step()
    run.close()
