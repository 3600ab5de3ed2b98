"""Sparse tables in PyTorch models: what comes out beside one process, what a run survives, and what is refused."""

from __future__ import annotations

import copy
import io
import time
from pathlib import Path
from typing import Any, Optional

import pytest

torch = pytest.importorskip("torch")

import paraft  # noqa: E402
import paraft.torch  # noqa: E402
import tables  # noqa: E402
from paraft.errors import ConfigError, MisuseError  # noqa: E402
from tables import DIM, FAR, IDS  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

STEPS = 30
PATIENT = {"cluster.grace_ms": 20_000}
SGD = {"kind": "sgd", "lr": 0.5}


def trained(out: str, fleets: dict[str, list[str]]) -> None:
    """A worker that trains all cases, each on servers of its own."""
    for case, servers in fleets.items():
        special = tables.CASES[case][2]
        table, m = tables.ours(case)
        run = paraft.init(servers=servers, settings=PATIENT)
        o = torch.optim.SGD(m.dense.parameters(), lr=0.1)
        run.prepare(m, o)
        all_ids = torch.arange(IDS) + (FAR if special == "far" else 0)
        first = table.rows(all_ids)
        for step in range(STEPS):
            if special == "accumulated":
                # What is thrown away leaves nothing, however it is thrown away.
                tables.loss(m, tables.batch(case, run.rank, step + 900)).backward()
                (o if step % 2 else m).zero_grad()
                with run.no_sync():
                    tables.loss(m, tables.batch(case, run.rank, step + 500)).backward()
            tables.loss(m, tables.batch(case, run.rank, step, special == "far")).backward()
            o.step()
            o.zero_grad()
        last = table.rows(all_ids.view(2, -1)).view(IDS, DIM)
        run.finish()
        torch.save((first, last, m.dense.state_dict()), f"{out}/{case} {run.rank}.pt")


def test_lock_step_gives_the_rows_of_one_process(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    fleets = {case: start_fleet(3 if case == "mean" else 1).servers for case in tables.CASES}
    run_workers(None, trained, 2, str(tmp_path), fleets, timeout=300)
    for case in tables.CASES:
        first, last, dense = torch.load(tmp_path / f"{case} 0.pt")
        again, other, _ = torch.load(tmp_path / f"{case} 1.pt")
        assert torch.equal(first, again) and torch.equal(last, other), f"{case}: both workers read the same"
        should, m = tables.trained_by_torch(case, first, 2, STEPS)
        apart = float((last - should).abs().max())
        # Where a gradient's own size is divided out, its rounding is not small.
        within = 2e-7 if tables.CASES[case][1]["kind"] == "sgd" else 2e-6
        assert float((last - first).abs().max()) > 0.05 and apart <= within, (case, apart)
        assert all(torch.allclose(dense[k], v, atol=1e-6) for k, v in m.dense.state_dict().items()), case


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


def counts(out: str, mode: str, steps: int) -> None:
    """Pushes ones at rows of its own and at one of both, so that rows count pushes."""
    table = paraft.torch.Table("counts", 2, max_rows=100, optimizer={"kind": "sgd", "lr": 1.0}, init={"kind": "zeros"})
    m = nn.ModuleDict({"rows": paraft.torch.Embedding(table), "dense": nn.Linear(1, 1)})
    run = paraft.init(mode=mode, settings=PATIENT)
    o = torch.optim.SGD(m["dense"].parameters(), lr=0.1)
    run.prepare(m, o)
    for step in range(steps):
        (-m["rows"](torch.tensor([run.rank, 7, 7])).sum()).backward()
        o.step()
        print("made", step, flush=True)
        time.sleep(0.005)
    Path(out, f"done {run.rank}").touch()
    while not Path(out, f"done {1 - run.rank}").exists():
        time.sleep(0.02)
    torch.save(table.rows(torch.tensor([0, 1, 7, 8])), f"{out}/{run.rank}.pt")
    run.finish()


@pytest.mark.parametrize("mode", ["ssp:2", "asp"])
def test_other_modes_apply_each_push_once(mode: str, start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    fleet, steps = start_fleet(3), 150
    workers = start_workers(fleet, counts, 2, str(tmp_path), mode, steps)
    workers[0].wait_for("made 40")
    fleet._processes[0].kill()
    workers.wait()
    for rank in range(2):
        rows = torch.load(tmp_path / f"{rank}.pt")
        assert rows.tolist() == [[steps] * 2, [steps] * 2, [4 * steps] * 2, [0, 0]]


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


def new(fleet: paraft.Fleet, layer: Any = paraft.torch.EmbeddingBag, *, prepare: Optional[dict[str, Any]] = None, **of: Any) -> Any:
    """The only worker of a job: its run, table, model and optimizer."""
    of = {"max_rows": 1000, "optimizer": SGD, "init": {"kind": "normal", "std": 0.3}, **of}
    table = paraft.torch.Table("t", DIM, **of)
    torch.manual_seed(0)
    m = nn.Sequential(layer(table), nn.Linear(DIM, 1))
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    run = paraft.init(fleet)
    run.prepare(m, o, **(prepare or {}))
    return run, table, m, o


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
        with pytest.raises(MisuseError, match="rate of table `items` is .*a number from 0"):
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


def test_a_padding_id_makes_no_row(fleet: Any) -> None:
    table = paraft.torch.Table("t", 2, max_rows=2, partitions=1, full="refuse", optimizer=SGD, init={"kind": "zeros"})
    m = nn.Sequential(paraft.torch.Embedding(table, padding_idx=0), nn.Linear(2, 1))
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    run = paraft.init(fleet)
    run.prepare(m, o)
    for ids in ([0, 1], [0, 2]):
        m[0](torch.tensor(ids)).sum().backward()
        o.step()
    assert table.rows(torch.tensor([0, 1, 2]))[:, 0].tolist() == [0.0, -0.5, -0.5]
    run.finish()


def test_ids_that_are_none_are_refused_at_that_line(fleet: Any) -> None:
    run, table, m, o = new(fleet)
    for ids, why in (
        (torch.tensor([[3, -1]]), "id -1 for table `t`: ids are 0 or more"),
        (torch.tensor([[1.0]]), "`t` are torch.float32"),
        (torch.tensor([[True]]), "`t` are torch.bool"),
        ([[1]], "`t` are list: they are a tensor of int64 or int32"),
    ):
        for reads in (m, table.rows):
            with pytest.raises(MisuseError, match=why):
                reads(ids)
    m(torch.tensor([[1, 2]], dtype=torch.int32)).sum().backward()
    o.step()
    assert run.step == 1
    run.finish()
    for reads in (m, table.rows):
        with pytest.raises(MisuseError, match="over: read them, and evaluate, before run.finish"):
            reads(torch.tensor([[1]]))


def test_what_a_table_cannot_be_is_said() -> None:
    good = {"max_rows": 10, "optimizer": SGD}
    for options, why in (
        ({"dim": 2.0}, "dim is 2.0; it is written like 32"),
        ({"max_rows": 1e6}, "max_rows is 1000000.0"),
        ({"optimizer": "sgd"}, 'optimizer is \'sgd\'; it is written like {"kind": "sgd"'),
        ({"init": "zeros"}, "init is 'zeros'"),
        ({"full": True}, "full is True"),
        ({"partitions": True}, "partitions is True"),
    ):
        with pytest.raises(ConfigError, match=why):
            paraft.torch.Table("t", **{"dim": 2, **good, **options})
    with pytest.raises(ConfigError, match="mode is 'avg'"):
        paraft.torch.EmbeddingBag(paraft.torch.Table("t", 2, **good), mode="avg")
    with pytest.raises(ConfigError, match="padding_idx is -1"):
        paraft.torch.Embedding(paraft.torch.Table("t", 2, **good), padding_idx=-1)
    with pytest.raises(ConfigError, match="a Embedding, and not a paraft.torch.Table"):
        paraft.torch.Embedding(nn.Embedding(2, 2))
    with pytest.raises(MisuseError, match="`t` is in no run: give it to the run's prepare"):
        paraft.torch.Embedding(paraft.torch.Table("t", 2, **good))(torch.tensor([1]))


def test_what_a_job_with_tables_cannot_have_is_said(start_fleet: Any) -> None:
    fleet = start_fleet(1)

    def job(optimizer: Any = None, init: Any = None, also: Any = None, **options: Any) -> Any:
        table = paraft.torch.Table("t", DIM, **{"max_rows": 100, "optimizer": SGD, **options.pop("of", {})})
        m = nn.Sequential(paraft.torch.EmbeddingBag(table), nn.Linear(DIM, 1), *([also(table)] if also else []))
        optimizer = (optimizer or torch.optim.SGD)(m.parameters(), lr=0.1)
        return paraft.init(fleet, **(init or {})), m, optimizer, options

    twin = paraft.torch.Table("t", DIM, max_rows=9, optimizer=SGD)
    for of, why in (
        ({"apply": "worker"}, "with tables apply is"),
        ({"apply": "mean"}, "with tables apply is"),
        ({"clip_norm": 1.0}, "cannot have clipping, which would leave the rows out"),
        ({"optimizer": torch.optim.LBFGS}, "`t` is on the servers, and with it .* LBFGS is none of"),
        ({"optimizer": lambda p, lr: [torch.optim.SGD(p, lr=lr)]}, "with tables prepare one optimizer"),
        ({"optimizer": lambda p, lr: object()}, "is a object, and not a torch.optim.Optimizer"),
        ({"also": lambda _: paraft.torch.Embedding(twin)}, "two tables are named `t`"),
        ({"init": {"settings": {"checkpoint.every_steps": 5}}}, "writes no checkpoints yet"),
        ({"of": {"optimizer": {"kind": "adamw", "lr": 1.0}}}, "unknown variant `adamw`, expected one of `sgd`"),
        ({"of": {"optimizer": {"kind": "adam", "lr": 1.0, "betas": [0.9, 0.9]}}}, "unknown field `betas`, expected one of"),
        ({"of": {"optimizer": {"kind": "adagrad", "lr": 1.0, "eps": 0.0}}}, "table `t`: optimizer.eps 0 is not within"),
        ({"of": {"optimizer": {"kind": "sgd", "lr": -1.0}}}, "table `t`: optimizer.lr -1 is not a number from 0"),
        ({"of": {"optimizer": {"kind": "ftrl", "lr": 1.0}}}, "table `t`: ftrl .* set init"),
    ):
        run, m, o, options = job(**of)
        with pytest.raises(ConfigError, match=why):
            run.prepare(m, o, **options)
    run, m, o, _ = job()
    with pytest.raises(ConfigError, match="`t` is on the servers, and local steps are not"):
        paraft.torch.DiLoCo(run, m, o)
    # The fleet and the last of them are unharmed.
    run.prepare(m, o)
    m(torch.tensor([[1]])).sum().backward()
    o.step()
    other = paraft.init(start_fleet(1))
    with pytest.raises(ConfigError, match="`t` is in another run: make one for each"):
        other.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1))
    run.finish()


def test_what_a_loop_with_tables_cannot_do_is_said(fleet: Any) -> None:
    run, table, m, o = new(fleet)
    ids = torch.tensor([[1, 2]])
    for copies in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(TypeError, match="`t` cannot be copied: its rows are on the servers"):
            copies(m)
    assert sorted(m.state_dict()) == ["1.bias", "1.weight"]
    for asks in (o.state_dict, run.save):
        with pytest.raises(MisuseError, match="checkpoints do not have the rows"):
            asks()
    before = table.rows(ids)
    m(ids).sum().backward()
    with pytest.raises(MisuseError, match=r"clip_grad_norm_\(\) would leave out the rows of table `t`"):
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu")
    o.zero_grad()
    scaler.scale(m(ids).sum()).backward()
    with pytest.raises(MisuseError, match="with tables train in float32 or bfloat16"):
        scaler.step(o)
    o.zero_grad()
    o.step()
    assert torch.equal(table.rows(ids), before), "what was refused has changed nothing"
    run.finish()
