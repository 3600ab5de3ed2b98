"""Sparse tables in PyTorch models: what comes out beside one process, and what a run survives."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Optional

import pytest

torch = pytest.importorskip("torch")

import paraft  # noqa: E402
import paraft.torch  # noqa: E402
import tables  # noqa: E402
from paraft.errors import MisuseError  # noqa: E402
from tables import DIM, FAR, IDS, new  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

STEPS = 30
PATIENT = {"cluster.grace_ms": 20_000}


def trained(out: str) -> None:
    """A worker of one job with a table and a model of each case."""
    made = {case: tables.ours(case) for case in tables.CASES}
    all_ids = {case: torch.arange(IDS) + (FAR if of[2] == "far" else 0) for case, of in tables.CASES.items()}
    whole = nn.ModuleDict({case: m for case, (_, m) in made.items()})
    run = paraft.init(settings=PATIENT)
    o = torch.optim.SGD(whole.parameters(), lr=0.1)
    run.prepare(whole, o)
    first = {case: table.rows(all_ids[case]) for case, (table, _) in made.items()}
    for step in range(STEPS):
        for case, (_, m) in made.items():
            # What is thrown away leaves nothing, however it is thrown away.
            tables.loss(m, tables.batch(case, run.rank, step + 900)).backward()
        (o if step % 2 else whole).zero_grad()
        for case, (_, m) in made.items():
            special = tables.CASES[case][2]
            if special == "accumulated":
                with run.no_sync():
                    tables.loss(m, tables.batch(case, run.rank, step + 500)).backward()
            tables.loss(m, tables.batch(case, run.rank, step, special == "far")).backward()
        o.step()
        o.zero_grad()
    last = {case: table.rows(all_ids[case].view(2, -1)).view(IDS, DIM) for case, (table, _) in made.items()}
    run.finish()
    torch.save((first, last, {case: m.dense.state_dict() for case, (_, m) in made.items()}), f"{out}/{run.rank}.pt")


def test_lock_step_gives_the_rows_of_one_process(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    run_workers(start_fleet(3), trained, 2, str(tmp_path), timeout=400)
    first, last, dense = torch.load(tmp_path / "0.pt")
    again, other, _ = torch.load(tmp_path / "1.pt")
    apart = {}
    for case in tables.CASES:
        assert torch.equal(first[case], again[case]) and torch.equal(last[case], other[case]), f"{case}: both workers read the same"
        should, m = tables.trained_by_torch(case, first[case], 2, STEPS)
        assert float((last[case] - first[case]).abs().max()) > 0.05, f"{case}: it trains"
        # Adam divides out a gradient's size, and makes much of one that is nothing but rounding.
        within = {"sgd": 5e-7, "adam": 1e-5}.get(tables.CASES[case][1]["kind"], 1e-6)
        off = {k: float((dense[case][k] - v).abs().max()) for k, v in m.dense.state_dict().items()}
        assert max(off.values()) <= 1e-6, (case, off)
        apart[case] = float((last[case] - should).abs().max()) / within
    assert max(apart.values()) <= 1, apart


def test_a_row_of_adam_counts_its_own_updates_and_torchs_all() -> None:
    rows = torch.zeros(IDS, DIM)
    rule = tables.CASES["some rows"][1]
    ours, theirs = nn.Parameter(rows.clone()), nn.Parameter(rows.clone())
    lazily, sparse = tables.Lazily(ours, rule), torch.optim.SparseAdam([theirs], lr=rule["lr"])
    for step in range(3):
        ids = torch.tensor([0, 1] if step == 2 else [0])
        ours.grad = torch.zeros(IDS, DIM).index_fill_(0, ids, 1.0)
        theirs.grad = torch.sparse_coo_tensor(ids[None], torch.ones(len(ids), DIM), (IDS, DIM))
        lazily.step(set(ids.tolist()))
        sparse.step()
    assert torch.allclose(ours[0], theirs[0]), "a row of each step"
    assert torch.allclose(ours[1], torch.tensor(-rule["lr"])) and float(theirs[1, 0]) > -0.7 * rule["lr"]


def counts(out: str, mode: str, steps: int, grace_ms: int, pause: float = 0.01) -> int:
    """Pushes ones at rows of its own and at one of both, so that rows count pushes; how often it has come back. After step 20 it does
    nothing for ``pause`` seconds."""
    table = paraft.torch.Table("counts", 2, max_rows=100, optimizer={"kind": "sgd", "lr": 1.0}, init={"kind": "zeros"})
    m = nn.ModuleDict({"rows": paraft.torch.Embedding(table), "dense": nn.Linear(1, 1)})
    run = paraft.init(mode=mode, settings={"cluster.grace_ms": grace_ms})
    o = torch.optim.SGD(m["dense"].parameters(), lr=0.1)
    run.prepare(m, o)
    for step in range(steps):
        rows = m["rows"](torch.tensor([run.rank, 7, 7]))
        (-rows.sum() + m["dense"](torch.ones(1)).sum()).backward()
        o.step()
        o.zero_grad()
        print("made", step, flush=True)
        time.sleep(pause if step == 20 else 0.01)
    Path(out, f"done {run.rank}").touch()
    while not Path(out, f"done {1 - run.rank}").exists():
        time.sleep(0.02)
    torch.save(table.rows(torch.tensor([0, 1, 7, 8])), f"{out}/{run.rank}.pt")
    rejoins: int = run.stats()["rejoins"]
    run.finish()
    return rejoins


def counted(out: Path, steps: int) -> None:
    for rank in range(2):
        assert torch.load(out / f"{rank}.pt").tolist() == [[steps] * 2, [steps] * 2, [4 * steps] * 2, [0, 0]]


@pytest.mark.parametrize("mode", ["ssp:2", "asp"])
def test_each_push_counts_once_while_a_server_is_killed(mode: str, start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    workers = start_workers(fleet, counts, 2, str(tmp_path), mode, 150, 20_000)
    workers[0].wait_for("made 40")
    fleet._processes[0].kill()
    workers.wait()
    counted(tmp_path, 150)


def test_a_worker_that_was_taken_out_reads_on(fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    # It is stopped while none of its pushes is on the way: one that is not acknowledged may be lost with its session.
    workers = start_workers(fleet, counts, 2, str(tmp_path), "asp", 150, 4_000, 2.0)
    workers[1].wait_for("made 20")
    time.sleep(0.7)
    os.kill(workers[1].process.pid, signal.SIGSTOP)
    time.sleep(12)
    os.kill(workers[1].process.pid, signal.SIGCONT)
    assert workers.wait().values[1] > 0
    counted(tmp_path, 150)
    assert "was written to" not in workers[1].err, "the weights that came with the rows are the servers'"


def survives(out: str, name: str) -> None:
    """Trains slowly, from the run's step on."""
    table, m = tables.ours("mean")
    run = paraft.init(settings=PATIENT)
    o = torch.optim.SGD(m.dense.parameters(), lr=0.1)
    run.prepare(m, o)
    while run.step < 60:
        tables.loss(m, tables.batch("mean", run.rank, run.step)).backward()
        o.step()
        o.zero_grad()
        print("step", run.step, flush=True)
        time.sleep(0.02)
    rows = table.rows(torch.arange(IDS))
    run.finish()
    torch.save((rows, m.dense.state_dict()), f"{out}/{name} {run.rank}.pt")


def test_a_killed_server_or_worker_changes_no_bit(start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    ends = []
    for name in ("whole", "server", "worker"):
        fleet = start_fleet(3)
        workers = start_workers(fleet, survives, 2, str(tmp_path), name)
        if name == "server":
            workers[0].wait_for("step 15")
            fleet._processes[0].kill()
        if name == "worker":
            workers[1].wait_for("step 15")
            workers[1].kill()
            again = start_workers(fleet, survives, 2, str(tmp_path), name, only=1)
            assert again[0].wait() == 0, again[0].said()
            assert "step 10\n" not in again[0].out and workers[0].wait() == 0, workers[0].said()
        else:
            workers.wait()
        ends += [torch.load(tmp_path / f"{name} {rank}.pt") for rank in range(2)]
    first = ends[0]
    for rows, dense in ends[1:]:
        assert torch.equal(rows, first[0]) and all(torch.equal(v, first[1][k]) for k, v in dense.items())


def test_the_script_sets_a_tables_rate(fleet: Any) -> None:
    table, m = tables.ours("sum")
    run = paraft.init(fleet)
    o = torch.optim.SGD(m.dense.parameters(), lr=0.1)
    run.prepare(m, o)
    first = table.rows(torch.arange(IDS))
    rates = [0.5 / (1 + step) for step in range(9)] + [0.5, 0.5]
    for step, rate in enumerate(rates):
        table.lr = rate if step < 9 else None
        tables.loss(m, tables.batch("sum", 0, step)).backward()
        o.step()
        o.zero_grad()
    should, _ = tables.trained_by_torch("sum", first, 1, len(rates), rates)
    assert float((table.rows(torch.arange(IDS)) - should).abs().max()) <= 2e-7
    for rate in (-1.0, float("nan"), float("inf"), "fast"):
        with pytest.raises(MisuseError, match="rate of table `sum` is .*a number from 0"):
            table.lr = rate
    run.finish()


@pytest.mark.parametrize("full", ["evict", "refuse"])
def test_a_full_table_evicts_or_refuses(full: str, fleet: Any) -> None:
    run, table, m, o = new(fleet, paraft.torch.Embedding, max_rows=8, partitions=1, full=full, init={"kind": "zeros"})
    for first in (0, 4, 8):
        m[0](torch.arange(first, first + 4)).sum().backward()
        o.step()
    moved = table.rows(torch.arange(12))[:, 0].tolist()
    assert moved == ([-0.5] * 8 + [0.0] * 4 if full == "refuse" else [0.0] * 4 + [-0.5] * 8)
    run.finish()


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant
        self.first = nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda first: self.inner(ids) + 0 * first, self.first, use_reentrant=self.reentrant)


WRAPS: dict[str, Any] = {
    "plain": lambda m: m,
    "checkpoint": lambda m: Checkpointed(m, False),
    "reentrant checkpoint": lambda m: Checkpointed(m, True),
    "compiled": lambda m: torch.compile(m, backend="aot_eager"),
    "autocast": lambda m: torch.autocast("cpu", torch.bfloat16)(m),
}


def test_what_wraps_a_model_changes_no_row(start_fleet: Any) -> None:
    ends = {}
    for name, wrap in WRAPS.items():
        run, table, m, o = new(start_fleet(1))
        wrapped = wrap(m)
        for step in range(5):
            ids = torch.arange(12).view(3, 4) % 7 + step
            wrapped(ids).sum().backward()
            (wrapped if isinstance(wrapped, nn.Module) else m).zero_grad()
            wrapped(ids).sum().backward()
            o.step()
            o.zero_grad()
            with torch.no_grad():
                wrapped(ids)  # leaves nothing for the next step
        ends[name] = table.rows(torch.arange(20))
        run.finish()
    for name, rows in ends.items():
        assert torch.allclose(rows, ends["plain"], atol=2e-2 if name == "autocast" else 1e-6), name


def test_a_penalty_of_a_gradient_reaches_the_rows(fleet: Any) -> None:
    run, table, m, o = new(fleet, paraft.torch.Embedding)
    before = table.rows(torch.tensor([1, 2]))
    w = before.clone().requires_grad_()
    found = m[0](torch.tensor([1, 2]))
    for rows in (found, w):
        (slope,) = torch.autograd.grad((rows**3).sum(), rows, create_graph=True)
        (slope**2).sum().backward()
    o.step()
    assert torch.allclose(table.rows(torch.tensor([1, 2])), before - 0.5 * w.grad, atol=1e-6)
    run.finish()


def test_a_frozen_layer_and_evaluation_train_nothing(fleet: Any) -> None:
    run, table, m, o = new(fleet)
    ids = torch.tensor([[1, 2]])
    before = table.rows(ids)
    assert before.shape == (1, 2, DIM) and not before.requires_grad
    m[0].requires_grad_(False)
    m(ids).sum().backward()
    with torch.inference_mode():
        assert torch.equal(m.eval()(ids), m.train()(ids))
    o.step()
    assert torch.equal(table.rows(ids), before)
    m[0].requires_grad_(True)
    m(ids).sum().backward()
    o.step()
    assert not torch.equal(table.rows(ids), before)
    run.finish()


def test_a_checkpoint_goes_on_with_other_servers_and_partitions_bit_for_bit(start_fleet: Any, tmp_path: Path) -> None:
    def job(servers: int, partitions: int, resume: Optional[str] = None) -> Any:
        rule = {"kind": "adam", "lr": 0.01}
        table = paraft.torch.Table("t", DIM, max_rows=100, optimizer=rule, init={"kind": "normal", "std": 0.3}, partitions=partitions)
        m = tables.Net(paraft.torch.EmbeddingBag(table, mode="mean"))
        o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        run = paraft.init(start_fleet(servers), run_dir=str(tmp_path / "run"), resume=resume)
        run.prepare(m, o)
        return run, table, m, o

    def train(m: nn.Module, o: Any, steps: range) -> None:
        for step in steps:
            o.zero_grad()
            tables.loss(m, tables.batch("mean", 0, step)).backward()
            o.step()

    def ends(run: Any, table: Any, m: nn.Module) -> list[Any]:
        last = [table.rows(torch.arange(IDS)), *(p.detach().clone() for p in m.parameters())]
        run.finish()
        return last

    run, table, m, o = job(3, 16)
    train(m, o, range(10))
    path = str(run.save())
    train(m, o, range(10, 20))
    want = ends(run, table, m)
    for servers, partitions in ((1, 7), (3, 64)):
        run, table, m, o = job(servers, partitions, path)
        assert run.step == 10
        train(m, o, range(10, 20))
        assert all(map(torch.equal, ends(run, table, m), want)), f"{servers} servers, {partitions} partitions"


def test_a_padding_id_makes_no_row(fleet: Any) -> None:
    table = paraft.torch.Table("t", 2, max_rows=2, partitions=1, full="refuse", optimizer=tables.SGD, init={"kind": "zeros"})
    m = nn.Sequential(paraft.torch.Embedding(table, padding_idx=0), nn.Linear(2, 1))
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    run = paraft.init(fleet)
    run.prepare(m, o)
    for ids in ([0, 1], [0, 2]):
        m[0](torch.tensor(ids)).sum().backward()
        o.step()
    assert table.rows(torch.tensor([0, 1, 2]))[:, 0].tolist() == [0.0, -0.5, -0.5]
    run.finish()
