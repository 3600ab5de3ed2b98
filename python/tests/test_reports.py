"""What scripts in public bug reports of other libraries do: it counts, or an error or a log line names it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from torch import nn  # noqa: E402

#: From 4 MiB on gradients are pushed during the backward pass.
SMALL, LARGE = 16, 1100
SIZES = pytest.mark.parametrize("width", [SMALL, LARGE], ids=["small", "large"])


def net(width: int = SMALL) -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def sgd(m: Any, **options: Any) -> Any:
    return torch.optim.SGD(m.parameters(), lr=0.05, **options)


def batches(steps: int) -> Any:
    return torch.randn(steps, 8, 6, generator=torch.Generator().manual_seed(5))


def backward(m: Any, x: Any) -> None:
    (m(x) - 1).square().mean().backward()


def step(m: Any, o: Any, x: Any) -> None:
    backward(m, x)
    o.step()
    o.zero_grad()


def train(m: Any, o: Any, steps: int) -> None:
    for x in batches(steps):
        step(m, o, x)


def apart(a: Any, b: Any) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters()))


def throw_away_last_layer(m: Any) -> None:
    for p in m[4].parameters():
        p.grad = None


@SIZES
def test_gradients_set_to_none_leave_a_layer_as_it_is(width: int, fleet: Any) -> None:
    m, plain = net(width), net(width)
    o, po = sgd(m), sgd(plain)
    run = paraft.init(fleet)
    run.prepare(m, o)
    for i, x in enumerate(batches(4)):
        for one, its in ((m, o), (plain, po)):
            backward(one, x)
            if i < 3:
                throw_away_last_layer(one)
            its.step()
            its.zero_grad()
    run.finish()
    assert apart(m, plain) < 1e-5


def test_pushed_gradient_set_to_none_is_an_error(fleet: Any) -> None:
    m = net(LARGE)
    o = sgd(m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    train(m, o, 2)
    backward(m, batches(1)[0])
    throw_away_last_layer(m)
    with pytest.raises(paraft.MisuseError, match="`4.* was thrown away.*overlap=False"):
        o.step()
    run.close()


@SIZES
def test_clipping_through_grad_data_names_clip_value(width: int, fleet: Any) -> None:
    m = net(width)
    o = sgd(m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    backward(m, batches(1)[0])
    for p in m.parameters():
        p.grad.data.clamp_(-0.001, 0.001)
    with pytest.raises(paraft.MisuseError, match="clip_value="):
        o.step()
    run.close()


def test_zero_grad_instead_of_a_step_names_the_remedy(fleet: Any) -> None:
    m = net(LARGE)
    o = sgd(m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    train(m, o, 2)
    backward(m, batches(1)[0] * float("nan"))
    o.zero_grad()
    with pytest.raises(paraft.MisuseError, match=r"overlap=False.*zero_grad\(\)"):
        train(m, o, 1)
    run.close()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = net(LARGE), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.a(self.body(x)) + self.b(self.body(x))


def test_probe_of_one_heads_gradient_is_not_trained_on(fleet: Any) -> None:
    m = TwoHeads()
    o = sgd(m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    train(m, o, 2)
    x = batches(1)[0]
    m.b(m.body(x).detach()).square().mean().backward()
    o.zero_grad()
    m.a(m.body(x)).square().mean().backward()
    with pytest.raises(paraft.MisuseError, match=r"`b\..*zero_grad\(\).*overlap=False"):
        o.step()
    run.close()


class TwoSteps(torch.optim.Optimizer):
    """As SAM: a script calls its two halves, or ``step(closure)``. The first half adds noise that is the gradient's direction."""

    def __init__(self, m: Any) -> None:
        super().__init__(list(m.parameters()), {"lr": 0.05})
        self.base = sgd(m)

    @torch.no_grad()
    def first_step(self) -> None:
        self.kept = [p.clone() for p in self.param_groups[0]["params"]]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=0.1)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p, kept in zip(self.param_groups[0]["params"], self.kept):
            p.copy_(kept)
        self.base.step()

    def step(self, closure: Any = None) -> None:
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


def test_halves_of_a_step_of_sam_are_refused(fleet: Any) -> None:
    m = net()
    o = TwoSteps(m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    x = batches(1)[0]
    backward(m, x)
    o.first_step()
    backward(m, x)
    with pytest.raises(paraft.MisuseError, match=r"`0.weight`.*step\(closure\)"):
        o.second_step()
    run.close()


def test_step_of_sam_with_a_closure_is_as_plain(fleet: Any) -> None:
    m, plain = net(), net()
    o, po = TwoSteps(m), TwoSteps(plain)
    run = paraft.init(fleet)
    run.prepare(m, o)
    for x in batches(3):
        for one, its in ((m, o), (plain, po)):
            backward(one, x)
            its.step(lambda one=one, x=x: backward(one, x))
            its.zero_grad()
    assert run.step == 3
    run.finish()
    assert apart(m, plain) < 1e-5


def test_group_added_to_a_workers_optimizer_is_an_error(fleet: Any) -> None:
    m = net()
    m[0].requires_grad_(False)
    o = torch.optim.SGD([*m[2].parameters(), *m[4].parameters()], lr=0.05)
    run = paraft.init(fleet)
    run.prepare(m, o, apply="worker")
    train(m, o, 1)
    m[0].requires_grad_(True)
    with pytest.raises(paraft.MisuseError, match="group with `0.weight` was added.*resume="):
        o.add_param_group({"params": list(m[0].parameters())})
    o.param_groups[0]["params"] += m[0].parameters()
    with pytest.raises(paraft.MisuseError, match="parameter groups were changed.*resume="):
        train(m, o, 1)
    run.close()


@pytest.mark.filterwarnings("ignore")
def test_graph_of_create_graph_is_freed_with_its_step(fleet: Any) -> None:
    kept: weakref.WeakSet[Any] = weakref.WeakSet()

    class Saved:
        def __init__(self, t: Any) -> None:
            self.t = t
            kept.add(self)

    m = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # whose gradient is copied
    o = sgd(m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda s: s.t):
            m(torch.ones(2, 3, 8, 8)).square().mean().backward(create_graph=True)
        assert kept
        o.step()
        o.zero_grad(set_to_none=True)
        gc.collect()
        assert not kept
    run.finish()


@pytest.mark.filterwarnings("ignore")
def test_accelerates_optimizer_trains_as_the_plain_one(fleet: Any) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    m, plain = net(), net()
    given, o = accelerator.prepare(m, sgd(m))
    run = paraft.init(fleet)
    assert run.prepare(given, o)[1] is o
    train(given, o, 3)
    train(plain, sgd(plain), 3)
    assert run.step == 3
    run.finish()
    assert apart(m, plain) < 1e-5


def with_own_step(o: Any) -> list[int]:
    """Replaces ``o.step`` by a function of the script's own, which counts its calls."""
    calls, before = [], o.step

    def own(*args: Any) -> Any:
        calls.append(1)
        return before(*args)

    o.step = own
    return calls


@pytest.mark.parametrize("scheduler", [False, True])
def test_step_that_a_script_replaced_is_refused(scheduler: bool, fleet: Any) -> None:
    m = net()
    o = sgd(m)
    if scheduler:
        torch.optim.lr_scheduler.StepLR(o, 2)
    with_own_step(o)
    with pytest.raises(paraft.ConfigError, match="optimizer.step was replaced.*register_step_post_hook"):
        paraft.init(fleet).prepare(m, o)


def test_replaced_step_of_a_workers_optimizer_is_called(fleet: Any) -> None:
    m = net()
    o = sgd(m)
    calls = with_own_step(o)
    run = paraft.init(fleet)
    run.prepare(m, o, apply="worker")
    train(m, o, 2)
    assert len(calls) == run.step == 2
    run.finish()


def test_own_keys_of_a_parameter_group_may_change(fleet: Any) -> None:
    m, plain = net(), net()
    o, po = (torch.optim.SGD([{"params": one.parameters(), "count": 0}], lr=0.05) for one in (m, plain))
    run = paraft.init(fleet)
    run.prepare(m, o)
    for x in batches(3):
        for one, its in ((m, o), (plain, po)):
            step(one, its, x)
            its.param_groups[0]["count"] += 1
    run.finish()
    assert apart(m, plain) < 1e-6 and o.param_groups[0]["count"] == 3


def lazy_statistics() -> Any:
    return nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d(affine=False))


def without_values() -> Any:
    with torch.device("meta"):
        return net()


def scripted() -> Any:
    return torch.jit.script(net())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lazy_statistics, "`1.running_mean` has no shape.*one batch"),
        (without_values, "`0.weight` is on the meta device.*to_empty"),
        (scripted, "ScriptModule"),
    ],
)
def test_model_that_cannot_be_trained_says_why(make: Callable[[], Any], why: str, fleet: Any) -> None:
    m = make()
    with pytest.raises(paraft.ConfigError, match=why):
        paraft.init(fleet).prepare(m, sgd(m))


def test_several_optimizers_have_the_whole_model(fleet: Any) -> None:
    m = net()
    both = [torch.optim.Adam(m[i].parameters()) for i in (0, 2)]
    run = paraft.init(fleet)
    for given in (both, tuple(both)):
        with pytest.raises(paraft.ConfigError, match="`4.weight` requires a gradient and is in no parameter group"):
            run.prepare(m, given)
    with pytest.raises(paraft.ConfigError, match="is a StepLR, and not a torch.optim.Optimizer, nor a list"):
        run.prepare(m, torch.optim.lr_scheduler.StepLR(both[0], 1))


def put_in_ones(m: Any) -> None:
    for p in m.parameters():
        p.data = torch.ones_like(p)


def test_replaced_data_is_undone_by_the_servers_finish(fleet: Any, caplog: Any) -> None:
    m, plain = net(), net()
    o = sgd(m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    train(m, o, 2)
    train(plain, sgd(plain), 2)
    put_in_ones(m)
    run.finish()
    assert apart(m, plain) < 1e-6 and "was written to" in caplog.text


def test_replaced_data_of_a_worker_is_in_the_last_mean(fleet: Any) -> None:
    m = net()
    o = sgd(m)
    run = paraft.init(fleet)
    run.prepare(m, o, apply="worker")
    train(m, o, 2)
    put_in_ones(m)
    run.finish()
    assert run.step == 3 and all(torch.allclose(p, torch.ones_like(p)) for p in m.parameters())


def test_float64_buffer_keeps_all_its_digits(fleet: Any) -> None:
    m = net()
    origin = torch.tensor([1_763_000_001.25, -1029.4889999193], dtype=torch.float64)
    m.register_buffer("origin", origin.clone())
    o = sgd(m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    assert torch.equal(m.origin, origin)
    train(m, o, 2)
    run.finish()
    assert torch.equal(m.origin, origin)


def test_save_warns_of_writes_that_servers_do_not_have(fleet: Any, tmp_path: Path, caplog: Any) -> None:
    m = net()
    o = sgd(m)
    run = paraft.init(fleet, settings={"checkpoint.dir": str(tmp_path)})
    run.prepare(m, o, apply="worker")
    train(m, o, 1)
    run.save()
    assert not caplog.messages
    with torch.no_grad():
        m[0].weight.clamp_(-0.05, 0.05)
    run.save()
    assert "without them" in caplog.text
    train(m, o, 1)
    run.finish()
