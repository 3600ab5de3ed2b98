"""``apply="mean"``: the gradients that a script clips, unscales or changes between ``backward()`` and ``step()`` are the mean, as
behind DDP's ``backward()``."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from pathlib import Path
from typing import Any, Optional

import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import clip_grad_norm_  # noqa: E402  (before paraft, as many scripts)

import loops  # noqa: E402
import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from loops import STEPS, Case, Norms, amsgrad, momentum  # noqa: E402
from models import SMALL_BUCKETS  # noqa: E402
from paraft.errors import MisuseError  # noqa: E402
from test_mean import Lion  # noqa: E402
from torch import nn  # noqa: E402

CASES: dict[str, Case] = {
    "by norm": Case(loops.by_norm, momentum),
    "by norm, pushed early": Case(loops.by_norm, momentum, early=True),
    "by inf norm": Case(loops.by_inf_norm, amsgrad),
    "by value": Case(loops.by_value, momentum),
    "per module": Case(loops.per_module, momentum),
    "in two calls": Case(loops.in_two_calls, momentum),
    "with noise": Case(loops.with_noise, amsgrad),
    "accumulated": Case(loops.accumulated, Lion),
    "in a closure": Case(loops.in_a_closure, momentum, zeroes=False),
    "on the way": Case(loops.on_the_way, momentum),
    "left out": Case(loops.left_out, amsgrad),
    "of some": Case(loops.of_some, momentum, model=loops.Branches, some_unused=True),
    "scaled": Case(loops.scaled, amsgrad),
    "scaled alone": Case(loops.scaled_alone, momentum),
    "scaled, fused": Case(loops.scaled, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
}
if not hasattr(nn.utils, "get_total_norm"):  # new in torch 2.6
    del CASES["in two calls"]


def on_paraft(out: str, fleets: dict[str, list[str]]) -> dict[str, Norms]:
    # Rank 1's scale is another one, as that of a worker that came back.
    return loops.on_paraft(CASES, out, fleets, "mean", scales=4)


def on_ddp(out: str) -> dict[str, Norms]:
    return loops.on_ddp(CASES, out)


def test_what_the_script_clips_is_the_mean_as_ddps(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    loops.compare(CASES, on_paraft, on_ddp, start_fleet, run_workers, tmp_path, scales=4)


def alone(steps: int) -> dict[str, Any]:
    """What one process gets of the batches that all workers have."""
    m, (o,) = CASES["by inf norm"].made(0)
    for batch in models.batches("mlp", 0, steps):
        models.loss(m, batch).backward()
        clip_grad_norm_(m.parameters(), 0.1)
        o.step()
        o.zero_grad()
    return m.state_dict()


def clips_through_faults(out: str, servers: list[str], dies: bool) -> Optional[int]:
    """A worker whose batches are those of all. Rank 1 dies between clipping and step 10; rank 0's wait is interrupted in step 15."""
    run = paraft.init(servers=servers, workers=2, settings=SMALL_BUCKETS)
    m, (o,) = CASES["by inf norm"].made(run.rank)
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
    m, (o,) = CASES["by norm"].made(0)
    run.prepare(m, o, apply="mean")
    some = list(models.batches("mlp", 0, 3))
    models.loss(m, some[0]).backward()
    clip_grad_norm_(m.parameters(), 0.1)
    with pytest.raises(MisuseError, match=r"run.save\(\) between"):
        run.save()
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
    m, (o,) = CASES["by norm"].made(0)
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
