"""What a script does between ``backward()`` and ``step()`` of a model with tables, beside one process with torch's sparse gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import paraft  # noqa: E402
import paraft.torch  # noqa: E402
import tables  # noqa: E402
from tables import DIM, IDS, SGD, new  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402

STEPS, BOUND = 20, 0.1
#: The steps in which rank 1, or the only worker, has an infinity in the gradient of a row.
BURSTS = (3, 11)
LOOPS = ("scaler", "clip", "scaler and clip", "setting")


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)


def backward(m: Any, step: int, rank: int, burst: bool, scale: Any) -> None:
    """The gradients of a worker's minibatch; a burst's infinity is in rows alone."""
    b = tables.batch("sum", rank, step)
    h = m.layer(b["ids"], b["offsets"])
    if burst:
        h.register_hook(lambda g: g.masked_fill(torch.arange(g.shape[0])[:, None] == 2, math.inf))
    scale(((m.dense(h) - b["target"]) ** 2).mean()).backward()


def loop(kind: str, m: Any, o: Any, ranks: list[int], workers: int, clips: bool) -> list[float]:
    """The norms that the script sees, and the last scale. ``ranks``: whose batches; in one process all ``workers``'."""
    scales, seen = scaler() if "scaler" in kind else None, []
    for step in range(STEPS):
        for rank in ranks:
            burst = scales is not None and step in BURSTS and rank == workers - 1
            backward(m, step, rank, burst, lambda loss: (scales.scale(loss) if scales else loss) / len(ranks))
        if scales and "clip" in kind:
            scales.unscale_(o)
        if clips:
            seen.append(float(clip_grad_norm_(m.parameters(), BOUND)))
        if scales:
            scales.step(o)
            scales.update()
        else:
            o.step()
        m.zero_grad()
    return [*seen, scales.get_scale() if scales else 0.0]


def trained(out: str, kind: str, mode: str) -> None:
    """A worker."""
    table, m = tables.ours("sum")
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    run = paraft.init(mode=mode)
    run.prepare(m, o, **({"clip_norm": BOUND} if kind == "setting" else {}))
    first = table.rows(torch.arange(IDS))
    seen = loop(kind, m, o, [run.rank], run.workers, "clip" in kind)
    last = table.rows(torch.arange(IDS))
    run.finish()
    torch.save((first, last, m.dense.state_dict(), seen), f"{out}/{run.rank}.pt")


def by_torch(kind: str, rows: torch.Tensor, workers: int) -> tuple[torch.Tensor, Any, list[float]]:
    """The same in one process."""
    m = tables.Net(nn.EmbeddingBag(IDS, DIM, mode="sum", sparse=True))
    m.layer.weight.data.copy_(rows)
    o = torch.optim.SGD([{"params": [m.layer.weight], "lr": 0.5}, {"params": m.dense.parameters()}], lr=0.1)
    seen = loop(kind, m, o, list(range(workers)), workers, kind != "scaler")
    return m.layer.weight.detach(), m, seen


@pytest.mark.parametrize("mode", ["bsp", "asp"])
@pytest.mark.parametrize("kind", LOOPS)
def test_scaled_and_clipped_steps_are_those_of_one_process(kind: str, mode: str, start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    workers = 2 if mode == "bsp" else 1
    run_workers(start_fleet(2), trained, workers, str(tmp_path), kind, mode)
    for rank in range(workers):
        first, last, dense, seen = torch.load(tmp_path / f"{rank}.pt")
        should, m, norms = by_torch(kind, first, workers)
        assert float((last - first).abs().max()) > 0.02, "it trains"
        assert float((last - should).abs().max()) < 1e-5
        assert all(torch.allclose(dense[k], v, atol=1e-5) for k, v in m.dense.state_dict().items())
        assert seen[-1] == norms[-1]
        if "clip" in kind:
            assert len(seen) == STEPS + 1
            for step, (got, want) in enumerate(zip(seen[:-1], norms[:-1])):
                assert got == pytest.approx(want, rel=1e-4) or not math.isfinite(got) and not math.isfinite(want), step
            assert max(norms[:3]) > 2 * BOUND, "it clips"


class Pair(nn.Module):
    """A layer of rows and a dense one, which one of several optimizers steps."""

    def __init__(self, layer: nn.Module, seed: int) -> None:
        super().__init__()
        self.layer = layer
        torch.manual_seed(seed)
        self.dense = nn.Linear(DIM, DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.layer(ids))


def duel(first: Pair, second: Pair, o: list[Any], ranks: list[int], scales: Any = None) -> None:
    """Alternate steps, as of a GAN: what the second's loss gives the first one's rows is thrown away."""
    for step in range(STEPS):
        for turn in (0, 1, 1):
            o[turn].zero_grad()
            for rank in ranks:
                ids = torch.randint(0, 10, (6, 3), generator=torch.Generator().manual_seed(100 * step + 10 * turn + rank))
                a, b = first(ids), second(ids)
                ((a.sum() + 1) ** 2 if turn == 0 else ((a - b) ** 2).sum()).div(100 * len(ranks)).backward()
            o[turn].step()


def duellists(out: str) -> None:
    """A worker with two models, each with a table and an optimizer."""
    of = {"max_rows": 100, "optimizer": SGD, "init": {"kind": "normal", "std": 0.3}}
    pairs = [Pair(paraft.torch.EmbeddingBag(paraft.torch.Table(f"t{i}", DIM, seed=i, **of), mode="sum"), i) for i in (0, 1)]
    o = [torch.optim.SGD(m.parameters(), lr=0.1) for m in pairs]
    run = paraft.init()
    run.prepare(pairs, o)
    first = [m.layer.table.rows(torch.arange(10)) for m in pairs]
    duel(*pairs, o, [run.rank])
    last = [m.layer.table.rows(torch.arange(10)) for m in pairs]
    run.finish()
    torch.save((first, last, [m.dense.state_dict() for m in pairs]), f"{out}/{run.rank}.pt")


def test_several_optimizers_step_their_tables_in_turn(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    run_workers(start_fleet(2), duellists, 2, str(tmp_path))
    first, last, dense = torch.load(tmp_path / "0.pt")
    pairs = [Pair(nn.EmbeddingBag(10, DIM, mode="sum"), i) for i in (0, 1)]
    for m, rows in zip(pairs, first):
        m.layer.weight.data.copy_(rows)
    o = [torch.optim.SGD([{"params": m.layer.parameters(), "lr": 0.5}, {"params": m.dense.parameters()}], lr=0.1) for m in pairs]
    duel(*pairs, o, [0, 1])
    for m, before, after, state in zip(pairs, first, last, dense):
        assert float((after - before).abs().max()) > 0.02, "it trains"
        assert torch.allclose(m.layer.weight, after, atol=1e-5)
        assert all(torch.allclose(state[k], v, atol=1e-5) for k, v in m.dense.state_dict().items())


def test_tables_train_alone(fleet: Any) -> None:
    table = paraft.torch.Table("t", DIM, max_rows=100, optimizer=SGD)
    m = paraft.torch.EmbeddingBag(table, mode="sum")
    run = paraft.init(fleet)
    m, o = run.prepare(m, paraft.torch.TableOptimizer())
    before, scales = table.rows(torch.arange(3)), scaler()
    for ids in (torch.tensor([[0, 1]]), torch.tensor([[1, 1]])):
        run.log(1.0)
        scales.scale(m(ids).sum()).backward()
        scales.step(o)
        scales.update()
        o.zero_grad()
    assert run.step == 2 and not list(m.parameters())
    assert torch.allclose(table.rows(torch.arange(3)), before - torch.tensor([[0.5], [1.5], [0.0]]), atol=1e-6)
    run.finish()


def test_the_optimizers_state_is_that_of_the_dense_weights(fleet: Any) -> None:
    table = paraft.torch.Table("t", DIM, max_rows=100, optimizer=SGD)
    m = nn.Sequential(paraft.torch.EmbeddingBag(table), nn.Linear(DIM, 1))
    o = torch.optim.Adam(m.parameters(), lr=0.1)
    run = paraft.init(fleet)
    run.prepare(m, o)
    ids = torch.tensor([[1, 2]])
    before = table.rows(ids)
    for _ in range(2):
        m(ids).sum().backward()
        state = o.state_dict()  # asks the servers, and leaves the step's gradients
        o.load_state_dict(state)
        o.step()
        o.zero_grad()
    state = o.state_dict()
    assert len(state["state"]) == 2 and [int(s["step"]) for s in state["state"].values()] == [2, 2]
    assert not torch.equal(table.rows(ids), before)
    run.finish()


def ahead(out: str, mode: str, named: str) -> int:
    """Counts pushes in rows, and keeps what each step sees of them; the bytes that it has pulled."""
    table = paraft.torch.Table("counts", 2, max_rows=100, optimizer={"kind": "sgd", "lr": 1.0}, init={"kind": "zeros"}, partitions=3)
    others = paraft.torch.Table("others", 1, max_rows=100, optimizer={"kind": "sgd", "lr": 1.0}, init={"kind": "zeros"})
    m = nn.ModuleDict({"rows": paraft.torch.Embedding(table), "others": paraft.torch.Embedding(others), "dense": nn.Linear(1, 1)})
    run = paraft.init(mode=mode, settings={"cluster.grace_ms": 20_000})
    o = torch.optim.SGD(m["dense"].parameters(), lr=0.1)
    run.prepare(m, o)
    ids, seen = torch.tensor([0, 1, 7, 9]), []
    read = torch.tensor([0, 1, 7, 9, 9])

    def name() -> None:
        for of in (table, others):
            of.prefetch(ids)
            if named == "stray":
                of.prefetch(ids + 20)

    for step in range(40):
        if named == "behind":
            name()
        rows, more = m["rows"](read), m["others"](read)
        seen.append([*rows[:, 0].tolist(), *more[:, 0].tolist()])
        mine = torch.tensor([run.rank, 2])
        loss = -rows[mine].sum() - more[mine].sum()
        (loss + m["dense"](torch.ones(1)).sum()).backward()
        if named in ("before", "stray"):
            name()
        if named == "stray" and step % 3 == 0:
            others.rows(ids)
        o.step()
        o.zero_grad()
    pulled: int = run.stats()["bytes_pulled"]
    run.finish()
    torch.save(seen, f"{out}/{named} {run.rank}.pt")
    return pulled


@pytest.mark.parametrize("mode", ["bsp", "ssp:1", "asp"])
def test_rows_named_ahead_are_as_fresh_as_those_of_their_step(mode: str, start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    bytes_of = {}
    for named in ("not", "before", "behind", "stray"):
        bytes_of[named] = run_workers(start_fleet(2), ahead, 2, str(tmp_path), mode, named).values
        for rank in range(2):
            seen = torch.load(tmp_path / f"{named} {rank}.pt")
            for step, row in enumerate(seen):
                for of in (row[:5], row[5:]):
                    mine, other, both = of[rank], of[1 - rank], of[2]
                    assert of[3:] == [0.0, 0.0]
                    if mode == "bsp":
                        assert (mine, other, both) == (step / 2, step / 2, step)
                    else:
                        assert mine == step, "a worker's own pushes are there"
                        assert other >= step - 1 or mode == "asp"
                        assert both >= step + (step - 1 if mode != "asp" else 0)
    if mode == "bsp":
        assert bytes_of["before"] == bytes_of["behind"] == bytes_of["not"], "no row comes twice"
