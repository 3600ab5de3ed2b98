"""A script's own writes to weights and buffers: they count, or an error says that they do not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Optional

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from torch import nn  # noqa: E402

Write = Callable[[Any], None]


def by_data(m: Any) -> None:
    for p in m.parameters():
        p.data.clamp_(-0.03, 0.03)


@torch.no_grad()
def in_place(m: Any) -> None:
    for p in m.parameters():
        p.clamp_(-0.03, 0.03)


def by_a_fused_optimizer(m: Any) -> None:
    """Torch's version counters do not count these writes (findings/torch-version-counters.sh)."""
    weights = [p.detach() for p in m.parameters()]
    before = [p._version for p in weights]
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_(weights, [torch.ones_like(p) for p in weights], [], **options)
    assert [p._version for p in weights] == before


def by_a_vector(m: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(m.parameters()).detach() * 0.9, m.parameters())


def train(m: Any, o: Any, steps: int, then: Optional[Write] = None, rank: int = 0) -> None:
    for batch in models.batches("mlp", rank, steps):
        models.loss(m, batch).backward()
        o.step()
        o.zero_grad()
        if then is not None:
            then(m)


def apart(a: Any, b: Any) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters()))


def loads(m: Any) -> None:
    m.load_state_dict({name: torch.full_like(t, 0.5) for name, t in m.state_dict().items()})


@pytest.mark.parametrize("write", [by_data, in_place, loads, by_a_fused_optimizer])
def test_write_behind_the_last_step_is_undone_by_finish(write: Write, fleet: Any, caplog: Any) -> None:
    run = paraft.init(fleet)
    m, plain = models.model("mlp"), models.model("mlp")
    o, its = models.optimizer("sgd", m), models.optimizer("sgd", plain)
    run.prepare(m, o, apply="servers")
    train(m, o, 3)
    train(plain, its, 3)
    write(m)
    assert apart(m, plain) > 0.01
    run.finish()
    assert apart(m, plain) < 1e-6
    assert [r for r in caplog.records if r.levelno == logging.ERROR]


@pytest.mark.parametrize("write", [by_data, in_place, by_a_fused_optimizer])
def test_write_behind_a_servers_step_is_an_error_line(write: Write, fleet: Any, caplog: Any) -> None:
    run = paraft.init(fleet)
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o, apply="servers")
    train(m, o, 2)
    assert not caplog.records
    write(m)
    train(m, o, 1)
    (said,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "`0.weight` was written to" in said.getMessage() and 'apply="worker"' in said.getMessage()
    train(m, o, 2)
    write(m)
    run.finish()
    assert "undone by 2 of 5 steps" in caplog.messages[-1], "that behind the last step, too"


@pytest.mark.parametrize("write", [by_data, in_place])
def test_write_with_workers_optimizer_counts_to_the_end(write: Write, fleet: Any) -> None:
    m, plain = models.model("mlp"), models.model("mlp")
    o, po = models.optimizer("sgd", m), models.optimizer("sgd", plain)
    run = paraft.init(fleet)
    run.prepare(m, o, apply="worker")
    train(m, o, 5, write)
    run.finish()
    train(plain, po, 5, write)
    assert apart(m, plain) < 1e-6


def clamps(_: str) -> list[Any]:
    """A worker that bounds its weights behind each step, the last one included."""
    run = paraft.init()
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o, apply="worker")
    train(m, o, 3, by_data, run.rank)
    run.finish()
    return [run.step, max(float(p.detach().abs().max()) for p in m.parameters()), sum(float(p.detach().sum()) for p in m.parameters())]


def test_writes_of_two_workers_end_in_one_mean(fleet: Any, run_workers: Any) -> None:
    (step, most, total), other = run_workers(fleet, clamps, 2, "").values
    assert [step, most, total] == other
    assert most <= 0.03 + 1e-6


def test_swapped_weights_that_come_back_say_nothing(fleet: Any, caplog: Any) -> None:
    run = paraft.init(fleet)
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o)
    for _ in range(3):
        train(m, o, 1)
        kept = {k: v.clone() for k, v in m.state_dict().items()}
        m.load_state_dict({k: v * 0.5 for k, v in kept.items()})
        m.load_state_dict(kept)
    run.finish()
    assert not caplog.records


class Scaled(nn.Module):
    """A large weight, whose digest is of a sample, and a scale, whose is not."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(256, 256)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Any) -> Any:
        return self.large(x).mean(1) * self.scale


def scaled(fleet: Any) -> tuple[Any, Any, Any, Callable[[], None]]:
    run = paraft.init(fleet)
    m = Scaled()
    o = torch.optim.SGD(m.parameters(), lr=1e-3)
    run.prepare(m, o)

    def step() -> None:
        m(torch.ones(2, 256)).sum().backward()
        o.step()
        o.zero_grad()

    return run, m, o, step


@pytest.mark.parametrize("of", ["scale", "large"])
def test_write_to_one_value_of_a_large_model_is_found(of: str, fleet: Any, caplog: Any) -> None:
    run, m, _, step = scaled(fleet)
    for _ in range(3):
        step()
        with torch.no_grad():
            (m.scale if of == "scale" else m.large.weight[70, 3]).add_(0.5)
    step()
    run.finish()
    name = "scale" if of == "scale" else "large.weight"
    assert any(f"`{name}` was written to" in line for line in caplog.messages)


def test_data_write_outside_the_sample_is_found_in_turn(fleet: Any, caplog: Any) -> None:
    run, m, _, step = scaled(fleet)
    for _ in range(12):  # every value of 257 KiB is looked at in 9 steps
        step()
        m.large.weight.data[70, 3] += 0.5
    assert any("`large.weight` was written to" in line for line in caplog.messages)
    run.close()


def test_memory_that_other_code_holds_follows_the_weights(fleet: Any) -> None:
    m = models.model("mlp")
    held = [p.data for p in m.parameters()]
    o = models.optimizer("sgd", m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    train(m, o, 2)
    run.finish()
    assert all(torch.equal(h, p) for h, p in zip(held, m.parameters()))


def test_write_by_other_code_that_holds_memory_is_found(fleet: Any, caplog: Any) -> None:
    m = models.model("mlp")
    held = [p.data for p in m.parameters()]
    o = models.optimizer("sgd", m)
    run = paraft.init(fleet)
    run.prepare(m, o)
    train(m, o, 1)
    held[2].zero_()
    train(m, o, 1)
    assert any("`2.weight` was written to" in line for line in caplog.messages)
    run.close()


def test_max_norm_of_an_embedding_is_an_error_line(fleet: Any, caplog: Any) -> None:
    m = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Flatten(), nn.Linear(12, 1))
    o = torch.optim.SGD(m.parameters(), lr=0.3)
    run = paraft.init(fleet)
    run.prepare(m, o)
    m(torch.arange(9).view(3, 3)).sum().backward()
    o.step()
    run.close()
    assert any("`0.weight` was written to" in line for line in caplog.messages)


class Centred(nn.Module):
    """A running mean that each forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.lin(x - self.mean)


def centred(apply: str, folder: str) -> list[float]:
    run = paraft.init(settings={"checkpoint.dir": folder})
    torch.manual_seed(1)
    m = Centred()
    o = torch.optim.SGD(m.parameters(), lr=0.01)
    run.prepare(m, o, apply=apply)
    for _ in range(3):
        m(torch.full((8, 4), float(run.rank + 1))).square().mean().backward()
        o.step()
        o.zero_grad()
    kept = paraft.torch.load_checkpoint(run.save())["model"]["mean"]
    run.finish()
    return [float(m.mean[0]), float(kept[0])]


@pytest.mark.parametrize("apply", ["servers", "worker"])
def test_reassigned_buffer_is_the_mean_of_the_workers(apply: str, fleet: Any, run_workers: Any, tmp_path: Any) -> None:
    values = run_workers(fleet, centred, 2, apply, str(tmp_path)).values
    for value in (v for of in values for v in of):
        assert abs(value - 1.5 * (1 - 0.5**3)) < 1e-5


@pytest.mark.parametrize("apply", ["servers", "worker"])
def test_expanded_buffer_gets_memory_of_its_own(apply: str, fleet: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(20, 10)
            self.register_buffer("shift", torch.ones(1).expand(10))

        def forward(self, x: Any) -> Any:
            return self.lin(x) + self.shift

    m = Net()
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    run = paraft.init(fleet)
    run.prepare(m, o, apply=apply)
    train(m, o, 2)
    m.shift[0] = 3.0
    train(m, o, 1)
    run.finish()
    assert m.shift.tolist() == [3.0] + [1.0] * 9


@pytest.mark.parametrize("now", [None, torch.zeros(7)])
def test_resized_buffer_is_named_with_its_remedy(now: Any, fleet: Any) -> None:
    run = paraft.init(fleet)
    m = Centred()
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    run.prepare(m, o)
    m.eval()(torch.ones(2, 4)).sum().backward()
    m.mean = now
    with pytest.raises(paraft.MisuseError, match=r"`mean` was torch.float32 \[4\].*persistent=False"):
        o.step()
    run.close()


def test_statistics_moved_after_the_last_step_are_told(fleet: Any, caplog: Any) -> None:
    run = paraft.init(fleet)
    m = models.model("conv")
    o = models.optimizer("sgd", m)
    run.prepare(m, o)
    for batch in models.batches("conv", 0, 2):
        models.loss(m, batch).backward()
        o.step()
        o.zero_grad()
    assert not caplog.records
    m(batch[0])
    run.finish()
    assert any("`1.running_mean` has moved" in line and "update_bn" in line for line in caplog.messages)


def test_step_of_another_optimizer_is_refused(fleet: Any) -> None:
    run = paraft.init(fleet)
    m, beside = models.model("mlp"), models.model("mlp")
    o, its = models.optimizer("sgd", m), models.optimizer("sgd", beside)
    run.prepare(m, o, apply="servers")
    train(m, o, 2)
    train(beside, its, 2)  # of weights of its own
    o = torch.optim.SGD(m.parameters(), lr=0.01)
    with pytest.raises(paraft.MisuseError, match="another optimizer than that of run.prepare"):
        train(m, o, 1)
    run.finish()
    train(m, o, 1)


def test_write_after_the_optimizer_is_gone_is_undone_by_finish(fleet: Any, caplog: Any) -> None:
    run = paraft.init(fleet)
    m = models.model("mlp")

    def epoch() -> None:
        o = models.optimizer("sgd", m)
        run.prepare(m, o, apply="servers")
        train(m, o, 2)

    epoch()
    trained = [p.detach().clone() for p in m.parameters()]
    by_data(m)
    run.finish()
    assert all(torch.equal(p, t) for p, t in zip(m.parameters(), trained))
    assert [r for r in caplog.records if r.levelno == logging.ERROR]


def test_changed_parameters_of_a_group_are_refused(fleet: Any) -> None:
    run = paraft.init(fleet)
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o, apply="servers")
    train(m, o, 1)
    o.param_groups[0]["params"] = o.param_groups[0]["params"][1:]
    with pytest.raises(paraft.ConfigError, match="the parameters of group 0 were changed"):
        train(m, o, 1)
