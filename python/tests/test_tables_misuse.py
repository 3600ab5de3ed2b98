"""What a table, a job with tables and its loop cannot have, and what they say of it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from paraft.errors import ConfigError, DivergedError, MisuseError  # noqa: E402
from tables import DIM, SGD, new  # noqa: E402
from torch import nn  # noqa: E402


def test_a_traced_or_exported_model_is_refused(fleet: Any) -> None:
    run, _, m, _ = new(fleet)
    for makes in (torch.jit.trace, torch.export.export):
        with pytest.raises(MisuseError, match="rows of table `t` are on the servers, and a traced or exported model has none"):
            makes(m, (torch.tensor([[1, 2]]),))
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


def test_what_the_optimizer_of_a_table_cannot_be_is_said_where_the_table_is_made() -> None:
    for optimizer, why in (
        ({"kind": "adamw", "lr": 1.0}, "unknown variant `adamw`, expected one of `sgd`"),
        ({"kind": "adam", "lr": 1.0, "betas": [0.9, 0.9]}, "unknown field `betas`, expected one of"),
        ({"kind": "adagrad", "lr": 1.0, "eps": 0.0}, "table `t`: optimizer.eps 0 is not within"),
        ({"kind": "sgd", "lr": -1.0}, "table `t`: optimizer.lr -1 is not a number from 0"),
        ({"kind": "ftrl", "lr": 1.0}, "table `t`: ftrl .* set init"),
    ):
        with pytest.raises(ConfigError, match=why):
            paraft.torch.Table("t", DIM, max_rows=100, optimizer=optimizer)


def test_what_a_job_with_tables_cannot_have_is_said(start_fleet: Any) -> None:
    fleet = start_fleet(1)

    def job(optimizer: Any = None, also: Any = None, **options: Any) -> Any:
        table = paraft.torch.Table("t", DIM, max_rows=100, optimizer=SGD)
        m = nn.Sequential(paraft.torch.EmbeddingBag(table), nn.Linear(DIM, 1), *([also(table)] if also else []))
        optimizer = (optimizer or torch.optim.SGD)(m.parameters(), lr=0.1)
        return paraft.init(fleet), m, optimizer, options

    twin = paraft.torch.Table("t", DIM, max_rows=9, optimizer=SGD)
    for of, why in (
        ({"apply": "worker"}, "with tables apply is"),
        ({"apply": "mean"}, "with tables apply is"),
        ({"clip_value": 1.0}, "cannot have clip.value, which would leave the rows out"),
        ({"optimizer": torch.optim.LBFGS}, "`t` is on the servers, and with it .* LBFGS is none of"),
        ({"optimizer": lambda p, lr: [torch.optim.SGD([one], lr=lr) for one in p]}, "`t`: several optimizers train the parameters beside"),
        ({"optimizer": lambda p, lr: paraft.torch.TableOptimizer()}, "requires a gradient and is in no parameter group"),
        ({"optimizer": lambda p, lr: object()}, "is a object, and not a torch.optim.Optimizer"),
        ({"also": lambda _: paraft.torch.Embedding(twin)}, "two tables are named `t`"),
    ):
        run, m, o, options = job(**of)
        with pytest.raises(ConfigError, match=why):
            run.prepare(m, o, **options)
    run, m, o, _ = job()
    with pytest.raises(ConfigError, match="`t` is on the servers, and local steps are not"):
        paraft.torch.DiLoCo(run, m, o)
    with pytest.raises(ConfigError, match="a TableOptimizer, and the model has no table"):
        paraft.init(fleet).prepare(nn.Linear(1, 1), paraft.torch.TableOptimizer())
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
    before = table.rows(ids)
    m(ids).sum().backward()
    with pytest.raises(MisuseError, match=r"clip_grad_value_\(\) would leave out the rows of table `t`"):
        nn.utils.clip_grad_value_(m.parameters(), 1.0)
    o.zero_grad()
    o.step()
    assert torch.equal(table.rows(ids), before), "what was refused has changed nothing"
    run.finish()


def test_a_gradient_that_is_not_finite_names_its_table(fleet: Any) -> None:
    run, table, m, o = new(fleet)
    before = table.rows(torch.tensor([1]))
    h = m[0](torch.tensor([[1]]))
    h.register_hook(lambda g: g * float("inf"))
    m[1](h).sum().backward()
    with pytest.raises(DivergedError, match="partition [0-9]+ of table `t`: the gradient of bucket [0-9]+ holds a NaN"):
        o.step()
    assert torch.equal(table.rows(torch.tensor([1])), before) and run.step == 1
    run.finish()


def test_in_asp_a_norm_without_the_rows_is_refused(fleet: Any) -> None:
    table = paraft.torch.Table("t", DIM, max_rows=9, optimizer=SGD)
    m = nn.Sequential(paraft.torch.EmbeddingBag(table), nn.Linear(DIM, 1))
    run = paraft.init(fleet, mode="asp")
    run.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1))
    m(torch.tensor([[1]])).sum().backward()
    with pytest.raises(MisuseError, match=r"get_total_norm\(\) would leave out the rows of table `t`.*clip_grad_norm_\(\) counts them in"):
        nn.utils.get_total_norm([p.grad for p in m.parameters()])
    run.close()
