"""Several ranks as one worker: DistributedDataParallel or FSDP2 inside, Paraft between."""

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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

STEPS = 20


def inside(how: str, m: nn.Module, group: Any) -> nn.Module:
    """A model whose gradients torch averages over a group's ranks."""
    if how == "ddp":
        return DistributedDataParallel(m, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    # FSDP2 wants tied layers together: the root has the transformer's embedding.
    for layer in m.layers.layers if isinstance(m, models.Transformer) else m.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(m, mesh=mesh)


def whole(m: nn.Module) -> dict[str, Any]:
    """The whole weights of a possibly sharded model, on each rank."""
    return get_model_state_dict(m, options=StateDictOptions(full_state_dict=True))


def grouped(out: str, servers: list[str], size: int, how: str, kind: str, optimizer: str, clip: float) -> dict[str, Any]:
    """A rank of a worker of ``size`` ranks."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(at, at + size))) for at in range(0, world, size)]
    own = groups[rank // size]
    m = models.model(kind, seed=rank if how == "ddp" else rank // size)  # FSDP2 takes each rank's own
    trains = inside(how, m, own)
    del os.environ["PARAFT_RANK"], os.environ["PARAFT_WORKERS"]  # torchrun sets none
    run = paraft.init(servers=servers, group=own)
    assert (run.rank, run.workers) == (rank // size, world // size)
    trains, o = run.prepare(trains, models.optimizer(optimizer, m))
    for batch in models.batches(kind, rank, STEPS):
        models.loss(trains, batch).backward()
        if clip:
            nn.utils.clip_grad_norm_(trains.parameters(), clip)
        o.step()
        o.zero_grad()
    stats = run.stats()
    run.report(1, 1.0, 1, 2)
    run.finish()
    # Of FSDP2 the first rank has the whole, and all have a part in it.
    torch.save(m.state_dict() if how == "ddp" else whole(m), f"{out}/grouped-{rank}.pt")
    dist.destroy_process_group()
    return {"step": stats["step"], "mode": stats["mode"], "pushed": stats["bytes_pushed"], "first": run.is_first}


def by_ddp(out: str, kind: str, optimizer: str, clip: float) -> None:
    """The same loop under DistributedDataParallel over all ranks."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    m = models.model(kind)
    ddp = DistributedDataParallel(m)
    o = models.optimizer(optimizer, m)
    for batch in models.batches(kind, rank, STEPS):
        models.loss(ddp, batch).backward()
        if clip:
            nn.utils.clip_grad_norm_(m.parameters(), clip)
        o.step()
        o.zero_grad()
    if rank == 0:
        torch.save(m.state_dict(), f"{out}/ddp.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("how", "kind", "optimizer", "clip", "within"),
    [
        ("ddp", "mlp", "momentum", 0.0, 2e-6),
        ("ddp", "mlp", "momentum", 0.1, 2e-6),
        ("ddp", "mlp", "adam", 0.0, 1e-4),
        ("fsdp", "mlp", "adam", 0.0, 1e-4),
        ("fsdp", "mlp", "momentum", 0.1, 2e-6),
        ("fsdp", "transformer", "momentum", 0.0, 2e-6),
    ],
)
def test_two_groups_of_two_are_four_ranks_of_ddp(
    fleet: paraft.Fleet, run_workers: Callable[..., Any], tmp_path: Path, how: str, kind: str, optimizer: str, clip: float, within: float
) -> None:
    said = run_workers(fleet, grouped, 4, str(tmp_path), fleet.servers, 2, how, kind, optimizer, clip).values
    run_workers(None, by_ddp, 4, str(tmp_path), kind, optimizer, clip)
    ddp = torch.load(tmp_path / "ddp.pt")
    largest = max(float(t.abs().max()) for t in ddp.values())
    for rank in range(4):
        ours = torch.load(tmp_path / f"grouped-{rank}.pt")
        if how == "fsdp" and rank != 0:
            continue
        assert ours.keys() == ddp.keys()
        assert max(float((ours[k] - ddp[k]).abs().max()) for k in ddp) <= within * largest, f"rank {rank}"
    assert [s["first"] for s in said] == [True, False, False, False]
    assert all(s["step"] == STEPS and s["mode"] == "bsp" for s in said)
    # The servers saw two workers' bytes, not four: all ranks report their worker's.
    assert said[0]["pushed"] == said[1]["pushed"] > 0


def local_steps(out: str, servers: list[str], how: str, size: int, every: int, fragments: int) -> None:
    """A rank of the job's only worker: ``size`` ranks, each with its part of the same data."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    m = models.model("mlp")
    trains = inside(how, m, dist.group.WORLD) if size > 1 else m
    run = paraft.init(servers=servers, rank=0, workers=1, group=dist.group.WORLD if size > 1 else None)
    o = models.optimizer("adam", m)
    with paraft.torch.DiLoCo(run, trains, o, every=every, fragments=fragments):
        for x, y in models.batches("mlp", 0, STEPS):
            share = len(x) // size
            models.loss(trains, (x[rank * share :][:share], y[rank * share :][:share])).backward()
            o.step()
            o.zero_grad()
        assert run.step == STEPS // every
    torch.save(m.state_dict() if how == "ddp" else whole(m), f"{out}/{how}-{size}-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(("how", "fragments"), [("ddp", 1), ("ddp", 2), ("fsdp", 1)])
def test_local_steps_of_group_equal_one_worker_with_all_data(
    start_fleet: Callable[..., paraft.Fleet], run_workers: Callable[..., Any], tmp_path: Path, how: str, fragments: int
) -> None:
    for size in (1, 2):
        fleet = start_fleet(1)
        run_workers(fleet, local_steps, size, str(tmp_path), fleet.servers, how if size > 1 else "ddp", size, 4, fragments)
    alone = torch.load(tmp_path / "ddp-1-0.pt")
    largest = max(float(t.abs().max()) for t in alone.values())
    for rank in range(2 if how == "ddp" else 1):
        ours = torch.load(tmp_path / f"{how}-2-{rank}.pt")
        assert max(float((ours[k] - alone[k]).abs().max()) for k in alone) <= 2e-5 * largest


def leased(servers: list[str], samples: int) -> list[list[int]]:
    """A rank of one of two workers, whose servers give out the data: what it trained on, by epoch."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([at, at + 1]) for at in (0, 2)]
    m = nn.Linear(1, 1)
    trains = DistributedDataParallel(m, process_group=groups[rank // 2])
    run = paraft.init(servers=servers, group=groups[rank // 2], rank=rank // 2, workers=2)
    data = TensorDataset(torch.arange(samples, dtype=torch.float32).view(-1, 1))
    loader = paraft.torch.LeasedLoader(run, data, batch_size=1, epochs=2)
    trains, o = run.prepare(trains, torch.optim.SGD(m.parameters(), lr=1e-6))
    seen: list[list[int]] = []
    for _ in range(2):
        seen.append([])
        for (x,) in loader:
            trains(x).sum().backward()
            o.step()
            o.zero_grad()
            seen[-1] += [int(v) for v in x]
    run.finish()
    dist.destroy_process_group()
    return seen


def test_leased_data_of_groups_is_trained_by_one_rank_each(fleet: paraft.Fleet, run_workers: Callable[..., Any]) -> None:
    said = run_workers(fleet, leased, 4, fleet.servers, 96).values
    for epoch in range(2):
        assert sorted(sample for seen in said for sample in seen[epoch]) == list(range(96))
    # Ranks of a worker stay together.
    assert len(said[0][0]) == len(said[1][0]) and len(said[2][1]) == len(said[3][1])


def loses_its_servers(out: str, servers: list[str]) -> str:
    """A rank of one worker that loses its servers during training."""
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


class TwoOutputs(nn.Module):
    """One of which the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.model("mlp")

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.inner(x)
        return {"first": out.detach().clone().requires_grad_() * 2, "second": out}


def changes(servers: list[str], how: str, scales: bool) -> str:
    """A rank of a group that changes gradients by itself."""
    dist.init_process_group("gloo")
    run = paraft.init(servers=servers, rank=0, workers=1, group=dist.group.WORLD)
    m = TwoOutputs()
    trains = inside(how, m, dist.group.WORLD)
    trains, o = run.prepare(trains, models.optimizer("sgd", m))
    scaler = torch.amp.GradScaler("cpu", enabled=scales)
    (batch,) = models.batches("mlp", dist.get_rank(), 1)
    said = []
    for by_hand in (True, False):
        scaler.scale(nn.functional.cross_entropy(trains(batch[0])["second"], batch[1])).backward()
        if by_hand:
            scaler.unscale_(o)
            for p in m.parameters():
                p.grad.mul_(0.5)
        try:
            scaler.step(o)
        except paraft.MisuseError as e:
            said.append(str(e))
        scaler.update()
        o.zero_grad()
    assert run.step == 1
    run.finish()
    dist.destroy_process_group()
    return "\n".join(said)


@pytest.mark.parametrize(("how", "scales"), [("ddp", False), ("fsdp", False), ("ddp", True)])
def test_a_changed_gradient_in_a_group_is_said(how: str, scales: bool, fleet: paraft.Fleet, run_workers: Callable[..., Any]) -> None:
    for said in run_workers(fleet, changes, 2, fleet.servers, how, scales, timeout=60).values:
        assert said.count("clip_norm=") == 1, said


def refused(servers: list[str]) -> list[str]:
    """The errors of invalid groups."""
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
    tries(dist.group.WORLD, ddp, overlap=True)
    part = nn.Sequential(fully_shard(nn.Linear(20, 4)), nn.Linear(4, 2))
    o = models.optimizer("sgd", part)
    tries(None, part)
    tries(dist.group.WORLD, part)
    dist.destroy_process_group()
    return said


def test_what_does_not_go_together_is_said(fleet: paraft.Fleet, run_workers: Callable[..., Any]) -> None:
    (said,) = run_workers(fleet, refused, 1, fleet.servers).values
    assert len(said) == 5
    assert "paraft.init(group=...)" in said[0] and "DDP(model, process_group=...)" in said[1]
    assert "overlap" in said[2] and "paraft.init(group=...)" in said[3]
    assert "`1.weight` is not sharded" in said[4]
