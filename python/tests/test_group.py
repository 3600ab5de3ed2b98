"""Several ranks as one worker: DistributedDataParallel inside, Paraft between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

STEPS = 20


def grouped(out: str, servers: list[str], size: int, kind: str, optimizer: str) -> dict[str, Any]:
    """A rank of a worker of ``size`` ranks."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(at, at + size))) for at in range(0, world, size)]
    own = groups[rank // size]
    m = models.model(kind, seed=rank)
    del os.environ["PARAFT_RANK"], os.environ["PARAFT_WORKERS"]  # torchrun sets none
    run = paraft.init(servers=servers, group=own)
    assert (run.rank, run.workers) == (rank // size, world // size)
    ddp, o = run.prepare(DistributedDataParallel(m, process_group=own), models.optimizer(optimizer, m))
    for batch in models.batches(kind, rank, STEPS):
        models.loss(ddp, batch).backward()
        o.step()
        o.zero_grad()
    stats = run.stats()
    run.report(1, 1.0, 1, 2)
    run.finish()
    torch.save(m.state_dict(), f"{out}/grouped-{rank}.pt")
    dist.destroy_process_group()
    return {"step": stats["step"], "mode": stats["mode"], "pushed": stats["bytes_pushed"], "first": run.is_first}


def by_ddp(out: str, kind: str, optimizer: str) -> None:
    """The same loop under DistributedDataParallel over all ranks."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    m = models.model(kind)
    ddp = DistributedDataParallel(m)
    o = models.optimizer(optimizer, m)
    for batch in models.batches(kind, rank, STEPS):
        models.loss(ddp, batch).backward()
        o.step()
        o.zero_grad()
    if rank == 0:
        torch.save(m.state_dict(), f"{out}/ddp.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(("kind", "optimizer", "within"), [("mlp", "momentum", 2e-6), ("mlp", "adam", 1e-4)])
def test_two_groups_of_two_are_four_ranks_of_ddp(
    fleet: paraft.Fleet, run_workers: Callable[..., Any], tmp_path: Path, kind: str, optimizer: str, within: float
) -> None:
    said = run_workers(fleet, grouped, 4, str(tmp_path), fleet.servers, 2, kind, optimizer).values
    run_workers(None, by_ddp, 4, str(tmp_path), kind, optimizer)
    ddp = torch.load(tmp_path / "ddp.pt")
    largest = max(float(t.abs().max()) for t in ddp.values())
    for rank in range(4):
        ours = torch.load(tmp_path / f"grouped-{rank}.pt")
        assert ours.keys() == ddp.keys()
        assert max(float((ours[k] - ddp[k]).abs().max()) for k in ddp) <= within * largest, f"rank {rank}"
    assert [s["first"] for s in said] == [True, False, False, False]
    assert all(s["step"] == STEPS and s["mode"] == "bsp" for s in said)
    # The servers saw two workers' bytes, and not four's: what a rank says is its worker's.
    assert said[0]["pushed"] == said[1]["pushed"] > 0


def loses_its_servers(out: str, servers: list[str]) -> str:
    """A rank of one worker, whose servers go away in the middle."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    settings = {"cluster.timeout_ms": 2_000}
    run = paraft.init(servers=servers, group=dist.group.WORLD, rank=0, workers=1, settings=settings)
    m = models.model("mlp")
    ddp, o = run.prepare(DistributedDataParallel(m), models.optimizer("sgd", m))
    try:
        for batch in models.batches("mlp", rank, 1_000_000):
            models.loss(ddp, batch).backward()
            o.step()
            o.zero_grad()
            if run.step == 5 and rank == 0:
                Path(out, "begun").touch()
    except paraft.UnavailableError as e:
        dist.destroy_process_group()  # else gloo's threads may end the process with an abort
        return str(e)
    raise AssertionError("nothing was raised")


def test_what_the_first_rank_is_told_is_raised_on_all(
    fleet: paraft.Fleet, start_workers: Callable[..., Any], tmp_path: Path
) -> None:
    workers = start_workers(fleet, loses_its_servers, 2, str(tmp_path), fleet.servers)
    until = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < until, "\n".join(w.said() for w in workers)
        time.sleep(0.02)
    for process in fleet._processes:
        process.kill()
    first, second = workers.wait(60).values
    assert second == f"rank 0 of this group: {first}"


def refused(servers: list[str]) -> list[str]:
    """What is said of groups that can't be."""
    dist.init_process_group("gloo")
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    said = []

    def tries(group: Any, model: nn.Module, **options: Any) -> None:
        run = paraft.init(servers=servers, group=group, rank=0, workers=1)
        try:
            run.prepare(model, o, **options)
        except paraft.ConfigError as e:
            said.append(str(e))

    ddp = DistributedDataParallel(m)
    tries(None, ddp)
    tries(dist.group.WORLD, m)
    tries(dist.group.WORLD, ddp, apply="worker")
    tries(dist.group.WORLD, ddp, overlap=True)
    dist.destroy_process_group()
    return said


def test_what_does_not_go_together_is_said(fleet: paraft.Fleet, run_workers: Callable[..., Any]) -> None:
    (said,) = run_workers(fleet, refused, 1, fleet.servers).values
    assert len(said) == 4
    assert "paraft.init(group=...)" in said[0] and "DDP(model, process_group=...)" in said[1]
    assert "apply=" in said[2] and "overlap" in said[3]
