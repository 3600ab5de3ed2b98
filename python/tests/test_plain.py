"""Models as scripts have them: memory, names, ties and hooks, before, during and behind a run."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


def train(m: Any, o: Any, kind: str, steps: int, begin: int = 0) -> None:
    for i, (x, y) in enumerate(models.batches(kind, 0, begin + steps)):
        if i < begin:
            continue
        x = x.to(next(m.parameters()).dtype) if x.is_floating_point() else x
        F.cross_entropy(m(x), y).backward()
        o.step()
        o.zero_grad()


def apart(a: Any, b: Any) -> float:
    theirs = b.state_dict()
    return max(float((v - theirs[k]).abs().max()) for k, v in a.state_dict().items() if v.is_floating_point())


@pytest.fixture
def defaults() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("apply", ["servers", "worker"])
def test_default_dtype_and_device_of_a_script_change_nothing(apply: str, fleet: Any, defaults: None) -> None:
    m, plain = models.model("conv"), models.model("conv")
    o, po = models.optimizer("adam", m), models.optimizer("adam", plain)
    batches = list(models.batches("conv", 0, 4))

    def steps(one: Any, its: Any, of: Any) -> None:
        for x, y in of:
            F.cross_entropy(one(x), y).backward()
            its.step()
            its.zero_grad()

    for one, its in ((m, o), (plain, po)):
        steps(one, its, batches[:1])
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    run = paraft.init(fleet)
    run.prepare(m, o, apply=apply)
    steps(m, o, batches[1:])
    state = o.state_dict()["state"]
    run.finish()
    torch.set_default_device(None)
    steps(plain, po, batches[1:])
    assert apart(m, plain) < 1e-3
    for i, entry in po.state_dict()["state"].items():
        assert torch.allclose(state[i]["exp_avg"], entry["exp_avg"], atol=1e-5), i


class Auto(nn.Module):
    """The decoder is the encoder, transposed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.dec = nn.Linear(20, 10, bias=False), nn.Linear(10, 20, bias=False)
        if how == "transposed":
            self.dec.weight.data = self.enc.weight.data.t()
        elif how == "part":
            self.dec.weight.data = self.enc.weight.data.view(20, 10)
        else:  # columns of one matrix: each has its own
            both = torch.randn(10, 40)
            self.enc.weight.data, self.dec.weight.data = both[:, :20], both[:, 20:].t()

    def forward(self, x: Any) -> Any:
        return self.dec(torch.tanh(self.enc(x)))[:, :10]


@pytest.mark.parametrize("how", ["transposed", "part"])
def test_weights_tied_by_memory_name_both_and_the_remedy(how: str, fleet: Any) -> None:
    m = Auto(how)
    run = paraft.init(fleet)
    with pytest.raises(paraft.ConfigError, match=r"`enc.weight` and `dec.weight` share memory.*F\.linear"):
        run.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1), apply="servers")


@pytest.mark.parametrize(("how", "apply"), [("transposed", "worker"), ("columns", "servers"), ("columns", "worker")])
def test_weights_that_share_a_storage_train_as_plain(how: str, apply: str, fleet: Any) -> None:
    m, plain = Auto(how), Auto(how)
    o, po = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (m, plain))
    run = paraft.init(fleet)
    run.prepare(m, o, apply=apply)
    train(m, o, "mlp", 4)
    train(plain, po, "mlp", 4)
    run.finish()
    assert apart(m, plain) < 1e-6


def test_parameter_twice_in_a_group_is_named(fleet: Any) -> None:
    m = models.model("mlp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        o = torch.optim.SGD([*m.parameters(), m[0].weight], lr=0.1)
    with pytest.raises(paraft.ConfigError, match="group 0 of the optimizer has `0.weight` twice"):
        paraft.init(fleet).prepare(m, o)


class Twice(nn.Module):
    """One BatchNorm under two names, a mask, a counter and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.out = nn.Linear(20, 8), nn.Linear(8, 8), nn.Linear(8, 10)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.bn1 = nn.BatchNorm1d(8)
        self.bn2 = self.bn1
        self.register_buffer("mask", torch.full((2,), float("-inf")))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        self.seen += 1
        return self.out(self.frozen(self.bn2(self.b(torch.relu(self.bn1(self.a(x)))))))


def compiled(m: Any) -> Any:
    return torch.compile(m, backend="eager")


def inside(m: Any) -> Any:
    m.a = torch.compile(m.a, backend="eager")
    return m


@pytest.mark.parametrize("wrap", [lambda m: m, compiled, inside])
def test_checkpoint_loads_strictly_into_its_own_model(wrap: Any, fleet: Any, tmp_path: Path) -> None:
    m = wrap(Twice())
    o = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    run = paraft.init(fleet, settings={"checkpoint.dir": str(tmp_path)})
    run.prepare(m, o)
    train(m, o, "mlp", 2)
    run.save()
    run.finish()
    alone = paraft.torch.load_checkpoint(tmp_path)["model"]
    trained = {k for k in Twice().state_dict() if not k.startswith(("frozen", "mask", "seen"))}
    assert set(alone) == trained, "no name of a wrapper's, and each alias"
    for other in (wrap(Twice()), Twice()):
        other.load_state_dict(paraft.torch.load_checkpoint(tmp_path, other)["model"], strict=True)
        for (k, v), w in zip(m.state_dict().items(), other.state_dict().values()):
            assert torch.equal(v, w) or "tracked" in k or "seen" in k, k


class Graph(nn.Module):
    """Its graph is a sparse buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.out = nn.Linear(20, 10)
        at = torch.arange(16)
        self.register_buffer("graph", torch.sparse_coo_tensor(torch.stack((at, at.flip(0))), torch.full((16,), scale), check_invariants=True))

    def forward(self, x: Any) -> Any:
        return torch.sparse.mm(self.graph, self.out(x))


def test_sparse_buffer_stays_the_workers_own(fleet: Any, tmp_path: Path) -> None:
    m, plain = Graph(2.0), Graph(2.0)
    o, po = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (m, plain))
    run = paraft.init(fleet, settings={"checkpoint.dir": str(tmp_path)})
    run.prepare(m, o)
    train(m, o, "mlp", 2)
    train(plain, po, "mlp", 2)
    run.save()
    run.finish()
    assert torch.allclose(m.out.weight, plain.out.weight, atol=1e-6) and torch.equal(m.graph.to_dense(), plain.graph.to_dense())
    other = Graph(3.0)
    other.load_state_dict(paraft.torch.load_checkpoint(tmp_path, other)["model"], strict=True)
    assert torch.equal(m.out.weight, other.out.weight) and float(other.graph.to_dense().max()) == 3.0


@pytest.mark.parametrize(("first", "then"), [(compiled, lambda m: m), (lambda m: m, compiled)])
def test_run_goes_on_with_and_without_the_compiler(first: Any, then: Any, start_fleet: Any, tmp_path: Path) -> None:
    m = first(models.model("mlp"))
    o = models.optimizer("adam", m)
    run = paraft.init(start_fleet(1), settings={"checkpoint.dir": str(tmp_path)})
    run.prepare(m, o)
    train(m, o, "mlp", 2)
    run.save()
    run.close()
    m = then(models.model("mlp"))
    o = models.optimizer("adam", m)
    run = paraft.init(start_fleet(1), resume=str(tmp_path))
    run.prepare(m, o)
    assert run.step == 2
    train(m, o, "mlp", 2, 2)
    run.finish()
    plain = models.model("mlp")
    po = models.optimizer("adam", plain)
    train(plain, po, "mlp", 4)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(m.parameters(), plain.parameters()))


def test_name_that_a_model_has_itself_is_kept(fleet: Any, tmp_path: Path) -> None:
    m = nn.ModuleDict({"module": nn.Linear(4, 2), "lin": nn.Linear(4, 2)})
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    run = paraft.init(fleet, settings={"checkpoint.dir": str(tmp_path)})
    run.prepare(m, o)
    (m["module"](torch.ones(1, 4)).sum() + m["lin"](torch.ones(1, 4)).sum()).backward()
    o.step()
    assert set(paraft.torch.load_checkpoint(run.save())["model"]) == set(m.state_dict())
    run.close()


@pytest.mark.parametrize("ends", ["finish", "close"])
@pytest.mark.parametrize("apply", ["servers", "worker"])
def test_model_is_plain_behind_its_run(ends: str, apply: str, start_fleet: Any) -> None:
    m = models.model("mlp")
    before = {k: type(v) for k, v in vars(m).items()}
    o = models.optimizer("sgd", m)
    run = paraft.init(start_fleet(1))
    run.prepare(m, o, apply=apply, **({"overlap": True} if apply == "servers" else {}))
    train(m, o, "mlp", 2)
    getattr(run, ends)()
    assert {k: type(v) for k, v in vars(m).items()} == before
    assert not m._forward_pre_hooks and not m._forward_hooks and not m._forward_pre_hooks_with_kwargs
    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in m.parameters())
    x = torch.ones(2, 20)
    kept = io.BytesIO()
    torch.save(m, kept)
    assert b"paraft" not in kept.getvalue()
    assert torch.equal(torch.jit.script(m)(x), m(x))
    assert torch.equal(torch.export.export(m, (x,)).module()(x), m(x))
    assert torch.equal(copy.deepcopy(m)(x), m(x)) and torch.equal(pickle.loads(pickle.dumps(m))(x), m(x))
    m.share_memory()
    # Another run, and one without any, while the old optimizer is held.
    again = models.optimizer("sgd", m)
    second = paraft.init(start_fleet(1))
    second.prepare(m, again)
    train(m, again, "mlp", 2)
    second.finish()
    train(m, models.optimizer("sgd", m), "mlp", 1)
    with pytest.raises(paraft.MisuseError, match="is over"):
        train(m, o, "mlp", 1)


def net(frozen: bool) -> tuple[Any, Any]:
    m = models.model("mlp")
    m[0].requires_grad_(not frozen)
    return m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("frozen", [True, False])
def test_layer_unfrozen_or_frozen_midway_goes_on(frozen: bool, start_fleet: Any, tmp_path: Path, caplog: Any) -> None:
    m, o = net(frozen)
    plain, po = net(frozen)
    run = paraft.init(start_fleet(1), settings={"checkpoint.dir": str(tmp_path)})
    run.prepare(m, o)
    train(m, o, "mlp", 2)
    m[0].requires_grad_(frozen)
    with pytest.raises(paraft.MisuseError, match="resume="):
        train(m, o, "mlp", 1)
    run.save()
    run.close()

    m, o = net(not frozen)
    run = paraft.init(start_fleet(1), resume=str(tmp_path))
    run.prepare(m, o)
    assert any("other layers were frozen there (`0.weight`)" in line for line in caplog.messages)
    train(m, o, "mlp", 2, 2)
    run.finish()
    train(plain, po, "mlp", 2)
    plain[0].requires_grad_(frozen)
    if not frozen:
        po = torch.optim.SGD([{"params": plain[2].parameters()}], lr=0.1, momentum=0.9)
        po.state.update({p: s for p, s in zip(plain[2].parameters(), [])})
    train(plain, po, "mlp", 2, 2)
    if frozen:
        assert apart(m, plain) < 1e-5
    else:
        assert torch.allclose(m[0].weight, plain[0].weight, atol=1e-6), "what is frozen stays as it was trained"


def grouped(n: int, pairs: int) -> tuple[Any, Any]:
    torch.manual_seed(1)
    m = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(n)])
    groups = [{"params": [p], "lr": 0.001 * (1 + i % pairs), "weight_decay": 0.01} for i, p in enumerate(m)]
    return m, torch.optim.AdamW(groups, eps=1e-4)


def step(m: Any, o: Any) -> None:
    torch.stack([p.square().sum() for p in m]).sum().backward()
    o.step()
    o.zero_grad()


def test_groups_of_one_rate_and_decay_train_as_one(fleet: Any, tmp_path: Path) -> None:
    (m, o), (plain, po) = grouped(1100, 7), grouped(1100, 7)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(its, 0.5) for its in (o, po)]
    run = paraft.init(fleet, settings={"checkpoint.dir": str(tmp_path)})
    run.prepare(m, o)
    for _ in range(3):
        for one, its, s in ((m, o, schedulers[0]), (plain, po, schedulers[1])):
            step(one, its)
            s.step()
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(m, plain))
    saved = paraft.torch.load_checkpoint(run.save())["optimizer"]
    for mine, theirs in zip(saved["param_groups"], po.param_groups):
        assert mine["lr"] == pytest.approx(theirs["lr"])
    run.finish()


def test_groups_that_part_later_name_the_remedy(fleet: Any) -> None:
    m, o = grouped(40, 2)
    run = paraft.init(fleet)
    run.prepare(m, o)
    step(m, o)
    o.param_groups[4]["lr"] = 1.0
    with pytest.raises(paraft.ConfigError, match="groups 0 and 4 had the same options.*lr 0.001 and 1, .*fewer groups"):
        step(m, o)
    run.close()


def test_more_rates_than_servers_hold_name_the_remedy(fleet: Any) -> None:
    m, o = grouped(1100, 1100)
    with pytest.raises(paraft.ConfigError, match="1100 parameter groups with 1100 different options.*the same ones"):
        paraft.init(fleet).prepare(m, o)


class Reentrant(nn.Module):
    """A layer in two reentrant checkpoints: its gradient comes twice in one backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.shared, self.last = nn.Linear(20, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 10)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda t: torch.tanh(self.shared(t)), x, use_reentrant=True)
        return self.last(x)


def test_layer_in_two_reentrant_checkpoints_is_as_plain(fleet: Any) -> None:
    m, plain = Reentrant(), Reentrant()
    o, po = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (m, plain))
    run = paraft.init(fleet)
    run.prepare(m, o)
    train(m, o, "mlp", 3)
    train(plain, po, "mlp", 3)
    run.finish()
    assert apart(m, plain) < 1e-5


def test_reentrant_checkpoints_with_overlap_are_an_error_at_once(fleet: Any) -> None:
    m = Reentrant()
    o = torch.optim.SGD(m.parameters(), lr=0.01)
    run = paraft.init(fleet)
    run.prepare(m, o, overlap=True)
    with pytest.raises(paraft.MisuseError, match="overlap=False"):
        train(m, o, "mlp", 1)
    assert run.step == 0
    run.close()


def test_layer_replaced_after_prepare_is_named(fleet: Any) -> None:
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    train(m, o, "mlp", 1)
    m[0] = compiled(m[0])
    train(m, o, "mlp", 1)
    before, m[2] = m[2], nn.Linear(64, 10)
    with pytest.raises(paraft.MisuseError, match="`2.weight` was replaced"):
        train(m, o, "mlp", 1)
    m[2] = before
    train(m, o, "mlp", 1)
    run.finish()


def test_model_saved_midway_loads_without_paraft(fleet: Any, tmp_path: Path) -> None:
    m = models.model("mlp")
    run = paraft.init(fleet)
    run.prepare(m, models.optimizer("sgd", m))
    torch.save(m, tmp_path / "model.pt")
    code = f"import sys, torch; m = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); print(m(torch.ones(1, 20)).tolist(), 'paraft' in sys.modules)"
    said = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""})
    assert said.split()[-1] == "False"
    assert torch.equal(copy.deepcopy(m)(torch.ones(1, 20)), m(torch.ones(1, 20)))
    run.close()


def test_script_with_tensor_parallelism_imported_trains(fleet: Any) -> None:
    import torch.distributed.tensor.parallel  # noqa: F401

    run, m = paraft.init(fleet), models.model("mlp")
    before = copy.deepcopy(m.state_dict())
    o = models.optimizer("sgd", m)
    run.prepare(m, o)
    train(m, o, "mlp", 2)
    run.finish()
    assert not torch.equal(m.state_dict()["0.weight"], before["0.weight"])


def test_prepare_in_inference_mode_trains(fleet: Any) -> None:
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run = paraft.init(fleet)
    with torch.inference_mode():
        run.prepare(m, o)
    train(m, o, "mlp", 1)
    run.finish()


def test_type_changed_after_prepare_is_named(fleet: Any) -> None:
    m = models.model("mlp").double()
    o = models.optimizer("sgd", m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    train(m, o, "mlp", 1)
    m.float()
    with pytest.raises(paraft.MisuseError, match="`0.weight` was torch.float64 on cpu.*before"):
        train(m, o, "mlp", 1)
    run.close()


@pytest.mark.parametrize("how", ["share_memory", "numpy"])
def test_memory_of_others_holds_the_trained_weights(how: str, fleet: Any) -> None:
    m = nn.Linear(20, 10)
    if how == "numpy":
        array = np.ones((10, 20), "float32")
        m.weight = nn.Parameter(torch.from_numpy(array))
    else:
        m.share_memory()
        array = m.weight.detach().numpy()
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    run = paraft.init(fleet)
    run.prepare(m, o)
    train(m, o, "mlp", 2)
    run.finish()
    assert m.weight.is_shared() == (how == "share_memory")
    assert (torch.from_numpy(array) == m.weight).all()
