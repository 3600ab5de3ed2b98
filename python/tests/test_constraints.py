"""Constraints: what the servers hold weights to is what a script that writes them itself has without Paraft."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from torch import nn  # noqa: E402


@torch.no_grad()
def clamped(m: Any) -> None:
    for p in m.parameters():
        p.clamp_(-0.03, 0.05)


@torch.no_grad()
def renormed(m: Any) -> None:
    m[0].weight.copy_(torch.renorm(m[0].weight, 2, 0, 0.3))


@torch.no_grad()
def of_norm_one(m: Any) -> None:
    m[0].weight.copy_(nn.functional.normalize(m[0].weight, dim=1))


CASES = [
    (clamped, {"*": paraft.clamp(-0.03, 0.05)}),
    (renormed, {"0.weight": paraft.max_norm(0.3)}),
    (of_norm_one, {"0.weight": paraft.unit_norm()}),
]


def apart(a: Any, b: Any) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters()))


@pytest.mark.parametrize("write, constraints", CASES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_constraint_gives_the_weights_of_a_plain_script(
    write: Callable[[Any], None], constraints: Any, optimizer: str, fleet: Any, caplog: Any
) -> None:
    m, plain = models.model("mlp"), models.model("mlp")
    o, its = models.optimizer(optimizer, m), models.optimizer(optimizer, plain)
    run = paraft.init(fleet)
    run.prepare(m, o, apply="servers", constraints=constraints)
    write(plain)
    assert apart(m, plain) < 1e-6, "the first weights are held to it, too"
    for batch in models.batches("mlp", 0, 20):
        for net, step in ((m, o), (plain, its)):
            models.loss(net, batch).backward()
            step.step()
            step.zero_grad()
        write(plain)
        if write is not of_norm_one:  # which changes the last bits again
            write(m)  # what is so already is no write
    run.finish()
    assert apart(m, plain) < 1e-5
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_embedding_with_max_norm_is_as_plain_torch(fleet: Any, caplog: Any) -> None:
    def net() -> Any:
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(10, 4, max_norm=0.7), nn.Flatten(), nn.Tanh(), nn.Linear(12, 1))

    m, plain = net(), net()
    o, its = (torch.optim.SGD(n.parameters(), lr=0.3) for n in (m, plain))
    run = paraft.init(fleet)
    run.prepare(m, o, constraints={"0.weight": paraft.max_norm(0.7)})
    g = torch.Generator().manual_seed(5)
    for _ in range(6):
        x = torch.randint(0, 10, (8, 3), generator=g)
        for one, step in ((m, o), (plain, its)):
            (one(x) - 1).square().mean().backward()
            step.step()
            step.zero_grad()
    run.finish()
    for one in (m, plain):
        one(torch.arange(10).view(1, 10)[:, :3])
    with torch.no_grad():
        rows = torch.renorm(plain[0].weight, 2, 0, 0.7)
    assert float((m[0].weight - rows).detach().abs().max()) < 1e-5
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_constraint_finds_a_parameter_by_a_wrappers_name(fleet: Any) -> None:
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run = paraft.init(fleet)
    wrapped = torch.compile(m)
    run.prepare(wrapped, o, constraints={"_orig_mod.0.weight": paraft.clamp(max=0.01)})
    run.finish()
    assert float(m[0].weight.detach().max()) == pytest.approx(0.01)
    assert float(m[0].weight.detach().min()) < -0.1


def test_pattern_finds_a_tied_parameter_by_its_second_name(fleet: Any) -> None:
    m = models.model("transformer")
    run = paraft.init(fleet)
    both = {"out.*": paraft.clamp(max=0.5), "embed.weight": paraft.max_norm(2.0)}
    run.prepare(m, models.optimizer("sgd", m), constraints=both)
    run.finish()
    embed = m.embed.weight.detach()
    assert float(embed.max()) <= 0.5 and float(embed.norm(dim=1).max()) <= 2.0 + 1e-5


def test_constraint_of_a_frozen_parameter_is_refused(fleet: Any) -> None:
    m = models.model("mlp")
    m[0].weight.requires_grad_(False)
    run = paraft.init(fleet)
    with pytest.raises(paraft.ConfigError, match="frozen"):
        trained = [p for p in m.parameters() if p.requires_grad]
        run.prepare(m, torch.optim.SGD(trained, lr=0.1), constraints={"0.weight": paraft.unit_norm()})


def test_constraints_of_a_job_are_set_by_name(fleet: Any) -> None:
    m = models.model("mlp")
    run = paraft.init(fleet, settings={"constraints": {"0.weight": {"clamp": [-0.01, 0.01]}}})
    run.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1))
    run.finish()
    assert float(m[0].weight.detach().abs().max()) == pytest.approx(0.01)


@pytest.mark.parametrize(
    "constraints, apply, word",
    [
        ({"0.wieght": paraft.clamp(0, 1)}, "auto", "did you mean `0.weight`"),
        ({"0.weight": paraft.clamp(1, 0)}, "auto", "holds no value"),
        ({"0.weight": paraft.max_norm(0)}, "auto", "above 0"),
        ({"0.weight": (0, 1)}, "auto", "paraft.clamp"),
        ([("0.weight", paraft.clamp(0, 1))], "auto", "it is a dict"),
        ({"*": paraft.clamp(0, 1), "0.weight": paraft.clamp(0, 2)}, "auto", "two of clamp for `0.weight`"),
        ({"0.weight": paraft.clamp(0, 1)}, "worker", "clamp them there"),
    ],
)
def test_wrong_constraint_is_refused(constraints: Any, apply: str, word: str, fleet: Any) -> None:
    m = models.model("mlp")
    run = paraft.init(fleet)
    with pytest.raises(paraft.ConfigError, match=word):
        run.prepare(m, models.optimizer("sgd", m), apply=apply, constraints=constraints)


def test_constraints_are_in_checkpoints(start_fleet: Any, tmp_path: Any) -> None:
    m = models.model("mlp")
    o = models.optimizer("adam", m)
    run = paraft.init(start_fleet(1), run_dir=str(tmp_path))
    held = {"0.weight": paraft.unit_norm(), "2.*": paraft.clamp(max=0.04)}
    run.prepare(m, o, constraints=held)
    for batch in models.batches("mlp", 0, 3):
        models.loss(m, batch).backward()
        o.step()
        o.zero_grad()
    path = run.save()
    run.finish()
    saved = paraft.torch.load_checkpoint(path)
    weight = saved["model"]["0.weight"]
    assert torch.allclose(weight.norm(dim=1), torch.ones(len(weight)), atol=1e-6)
    assert {float(s["step"]) for s in saved["optimizer"]["state"].values()} == {3.0}
    # A run resumes from it, also without bounds.
    for constraints in (held, {}):
        again = models.model("mlp", seed=1)
        run = paraft.init(start_fleet(1), resume=path)
        run.prepare(again, models.optimizer("adam", again), constraints=constraints)
        assert torch.equal(again[0].weight, weight) and run.step == 3
        run.close()
