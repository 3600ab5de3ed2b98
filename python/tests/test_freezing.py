"""Parameter groups that a script freezes and unfreezes while it trains, as under DDP, where the script makes a new wrapper for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Optional

import pytest
from conftest import recorded_loss

torch = pytest.importorskip("torch")

import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from paraft.errors import MisuseError  # noqa: E402
from paraft.torch._flat import Flat  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

torch.set_num_threads(1)
STEPS = 24
SMALL_BUCKETS = {"cluster.bucket_bytes": 1024}
#: The layers that are trained, from the steps on at which that changes.
TRAINED = {0: {4}, 5: {2, 4}, 10: {0, 2, 4}, 16: {0, 2}, 20: {0, 4}}


def net(kind: str, seed: int = 0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A group for each layer, with a rate of its own: those of the first two are frozen."""
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    freeze(m, 0)
    groups: list[Any] = [{"params": list(m[i].parameters())} for i in (0, 2, 4)]
    return m, torch.optim.AdamW(groups, weight_decay=0.1) if kind == "adamw" else torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def freeze(m: nn.Sequential, step: int) -> None:
    """Freezes the layers as before this step."""
    trained = TRAINED[max(at for at in TRAINED if at <= step)]
    for i in (0, 2, 4):
        m[i].requires_grad_(i in trained)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(16, 8, generator=draw), torch.randint(4, (16,), generator=draw)


def train(m: nn.Sequential, o: torch.optim.Optimizer, rank: int, first: int, last: int, ddp: bool = False, clips: bool = False) -> list[float]:
    called: nn.Module = m
    losses = []
    for step in range(first, last):
        freeze(m, step)
        if ddp and (step in TRAINED or step == first):
            called = nn.parallel.DistributedDataParallel(m)
        for i, group in enumerate(o.param_groups):
            group["lr"] = (0.004, 0.007, 0.02)[i] / (1 if step < 7 else 2)
        x, y = batch(rank, step)
        loss = F.cross_entropy(called(x), y)
        loss.backward()
        losses.append(loss.item())
        if clips and step % 2:
            nn.utils.clip_grad_norm_(m.parameters(), 0.2)
        o.step()
        o.zero_grad()
    return losses


def by_ddp(out: str, kind: str, clips: bool = False, same: bool = False) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    m, o = net(kind)
    train(m, o, 0 if same else rank, 0, STEPS, ddp=True, clips=clips)
    torch.save(m.state_dict(), f"{out}/ddp {rank}.pt")
    torch.distributed.destroy_process_group()


def trains(out: str, servers: list[str], kind: str, options: dict[str, Any], clips: bool = False, first: int = 0, last: int = STEPS) -> int:
    """Trains some of the steps, and saves; worker 1 begins with weights of its own, which worker 0's replace."""
    settings = {"checkpoint.dir": f"{out}/checkpoints", **SMALL_BUCKETS}
    run = paraft.init(servers=servers, settings=settings, resume=f"{out}/checkpoints" if first else None)
    m, o = net(kind, seed=run.rank)
    run.prepare(m, o, **options)
    assert run.step == first
    train(m, o, run.rank, first, last, clips=clips)
    if last < STEPS:
        run.save()
        run.close()
    else:
        run.finish()
        torch.save(m.state_dict(), f"{out}/paraft {run.rank}.pt")
    return run.step


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference, in parts of the largest value of its tensor."""
    return max(float((value - b[name]).abs().max() / value.abs().max()) for name, value in a.items())


def check_ends(out: Path) -> None:
    one, two = (torch.load(out / f"paraft {rank}.pt") for rank in range(2))
    assert apart(one, two) == 0
    assert apart(torch.load(out / "ddp 0.pt"), one) < 1e-5


@pytest.mark.parametrize(("kind", "overlap", "clips"), [("adamw", False, False), ("sgd", True, False), ("sgd", False, True)])
def test_layers_unfrozen_one_by_one_are_ddps(kind: str, overlap: bool, clips: bool, start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    run_workers(None, by_ddp, 2, str(tmp_path), kind, clips)
    run_workers(None, trains, 2, str(tmp_path), start_fleet(3).servers, kind, {"overlap": overlap}, clips)
    check_ends(tmp_path)


@pytest.mark.parametrize("at", [4, 12], ids=["before", "behind"])
def test_resume_across_the_unfreezing(at: int, start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    run_workers(None, by_ddp, 2, str(tmp_path), "adamw")
    for first, last in ((0, at), (at, STEPS)):
        run_workers(None, trains, 2, str(tmp_path), start_fleet(1).servers, "adamw", {}, False, first, last)
    check_ends(tmp_path)


def follows(out: str, servers: list[str], stops: Optional[int]) -> int:
    """All workers have the same batches, by ``run.step``: the mean is as of one, whoever is missing."""
    run = paraft.init(servers=servers, settings={"cluster.grace_ms": 500, **SMALL_BUCKETS})
    m, o = net("adamw")
    run.prepare(m, o)
    back = Path(out) / "back"
    if run.step:
        back.touch()
    while run.step < STEPS:
        if run.rank == 1 and run.step == stops:
            print("stops", flush=True)
            time.sleep(600)
        while run.step == 12 and not back.exists():
            time.sleep(0.05)
        train(m, o, 0, run.step, run.step + 1)
    run.finish()
    torch.save(m.state_dict(), f"{out}/paraft {run.rank}.pt")
    return run.step


def test_worker_killed_between_two_unfreezings(start_fleet: Any, start_workers: Any, run_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    run_workers(None, by_ddp, 2, str(tmp_path), "adamw", False, True)
    workers = start_workers(None, follows, 2, str(tmp_path), fleet.servers, 7)
    workers[1].wait_for("stops")
    workers[1].kill()
    again = start_workers(None, follows, 2, str(tmp_path), fleet.servers, None)
    again[0].kill()
    assert again[1].wait() == 0 and workers[0].wait() == 0, [w.said() for w in (*workers, *again)]
    check_ends(tmp_path)


def disagrees(servers: list[str], who: int, thaws: bool) -> None:
    """At step 3 one worker freezes, or unfreezes, a layer, and the other does not."""
    run = paraft.init(servers=servers, settings={"cluster.timeout_ms": 60_000, **SMALL_BUCKETS})
    m, o = net("sgd")
    if not thaws:
        m[2].requires_grad_(True)
    run.prepare(m, o)
    for step in range(6):
        if step == 3 and run.rank == who:
            m[2].requires_grad_(thaws)
        x, y = batch(run.rank, step)
        F.cross_entropy(m(x), y).backward()
        o.step()
        o.zero_grad()
        print(f"step {step}", flush=True)


@pytest.mark.parametrize(("who", "thaws"), [(0, True), (1, False)])
def test_worker_alone_in_it_is_an_error_by_name(who: int, thaws: bool, fleet: Any, start_workers: Any) -> None:
    workers = start_workers(None, disagrees, 2, fleet.servers, who, thaws)
    trains = workers[who if thaws else 1 - who]
    assert trains.wait() != 0 and "has trained `2.weight` on no worker" in trains.err, trains.said()
    assert trains.out.splitlines()[-1:] == ["step 2"]


class Frozen(nn.Module):
    """A trained part, and frozen ones of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head, self.odd = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4), nn.ParameterDict()
        others = {"whole": torch.arange(4), "none": torch.zeros(0), "expanded": torch.ones(1).expand(5), "f16": torch.ones(3, dtype=torch.float16)}
        for name, t in others.items():
            self.odd[name] = nn.Parameter(t, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x) * self.odd["f16"].sum())


def held(groups: Any) -> set[str]:
    m = Frozen()
    return set(Flat(m, torch.optim.SGD(groups(m), lr=0.1), None, freezes=True).names)


def test_frozen_groups_alone_are_the_servers() -> None:
    heads = {"head.weight", "head.bias"}
    assert held(lambda m: m.parameters()) == heads, "the base of an adapted model does not travel"
    assert held(lambda m: m.head.parameters()) == heads
    assert held(lambda m: [{"params": m.head.parameters()}, {"params": [*m.base.parameters(), *m.odd.values()]}]) == heads | {
        "base.weight", "base.bias", "odd.f16"
    }


@pytest.mark.parametrize("apply", ["servers", "mean", "worker"])
def test_what_cannot_be_unfrozen_is_an_error_at_the_line(apply: str, fleet: Any) -> None:
    run = paraft.init(fleet)
    m = Frozen()
    o = torch.optim.SGD([{"params": [*m.head.parameters(), m.base.weight]}], lr=0.1)
    run.prepare(m, o, apply=apply)
    for given in (m.base.bias, [("base.bias", m.base.bias)]):
        with pytest.raises(MisuseError, match="group with `base.bias` was added after run.prepare"):
            o.add_param_group({"params": given})
    for p, name in ((m.base.weight, "weight"), (m.base.bias, "bias")):
        p.requires_grad_(True)
        m(torch.ones(2, 8)).sum().backward()
        with pytest.raises(MisuseError, match=f"`base.{name}` was unfrozen after run.prepare.*resume="):
            o.step()
        p.requires_grad_(False)
        o.zero_grad()
    m(torch.ones(2, 8)).sum().backward()
    o.step()
    run.finish()
    o.add_param_group({"params": [m.base.bias]})


def test_unfrozen_between_backward_and_step(fleet: Any) -> None:
    run = paraft.init(fleet)
    m, o = net("sgd")
    run.prepare(m, o, overlap=True)
    for step in range(2):
        x, y = batch(0, step)
        F.cross_entropy(m(x), y).backward()
        if step:
            m[2].requires_grad_(True)
            with pytest.raises(MisuseError, match="`2.weight` was unfrozen between backward"):
                o.step()
            m[2].requires_grad_(False)
        o.step()
        o.zero_grad()
    run.finish()


def test_rate_changed_between_clip_and_step_is_an_error(fleet: Any) -> None:
    run = paraft.init(fleet)
    m, o = net("sgd")
    run.prepare(m, o)
    x, y = batch(0, 0)
    F.cross_entropy(m(x), y).backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    o.param_groups[2]["lr"] = 0.5
    with pytest.raises(MisuseError, match=r"changed between clip_grad_norm_\(\) and optimizer.step"):
        o.step()
    run.close()


@pytest.mark.parametrize("mode", ["asp", "ssp:2"])
def test_workers_unfreeze_by_their_own_steps_in_other_modes(mode: str, start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    assert run_workers(start_fleet(1), alone, 2, str(tmp_path), mode).values == [True, True]


def alone(out: str, mode: str) -> bool:
    """Worker 1 unfreezes the second layer later than worker 0, and the first layer stays frozen."""
    run = paraft.init(mode=mode, settings=SMALL_BUCKETS)
    m, o = net("sgd")
    run.prepare(m, o)
    first, second = m[0].weight.clone(), m[2].weight.clone()
    for step in range(20):
        m[2].requires_grad_(step > 4 + 4 * run.rank)
        x, y = batch(run.rank, step)
        F.cross_entropy(m(x), y).backward()
        o.step()
        o.zero_grad()
    run.finish()
    return torch.equal(m[0].weight, first) and not torch.equal(m[2].weight, second)


def test_norm_clipped_by_the_servers_in_asp_says_why_not(fleet: Any) -> None:
    run = paraft.init(fleet, mode="asp")
    m, o = net("sgd")
    run.prepare(m, o, clip_norm=1.0)
    x, y = batch(0, 0)
    F.cross_entropy(m(x), y).backward()
    with pytest.raises(MisuseError, match="clip_norm in mode asp.*clip_grad_norm_"):
        o.step()
    run.close()


def test_losses_are_recorded_whatever_is_frozen(fleet: Any, tmp_path: Path) -> None:
    m, o = net("sgd")
    with paraft.init(fleet, run_dir=str(tmp_path)) as run:
        run.prepare(m, o)
        losses = train(m, o, 0, 0, STEPS)
    loss, steps = recorded_loss(tmp_path)
    assert steps > 20 and loss == pytest.approx(sum(losses[:steps]) / steps, rel=1e-4)


def test_optimizer_state_is_torchs(fleet: Any) -> None:
    (m, o), (plain, po) = net("adamw"), net("adamw")
    run = paraft.init(fleet)
    run.prepare(m, o)
    for first, last in ((0, 3), (3, 8), (8, 12)):
        train(m, o, 0, first, last)
        train(plain, po, 0, first, last)
        ours, theirs = (x.state_dict()["state"] for x in (o, po))
        assert ours.keys() == theirs.keys()
        for i, entry in theirs.items():
            assert ours[i]["step"] == entry["step"], "a layer's bias correction counts its own steps"
            assert torch.allclose(ours[i]["exp_avg"], entry["exp_avg"], atol=1e-6)
    run.finish()
    assert apart(plain.state_dict(), m.state_dict()) < 1e-5


def test_one_of_several_optimizers_has_a_frozen_group(fleet: Any) -> None:
    def play(m: nn.Sequential, first: Any, second: Any) -> None:
        for step in range(12):
            m[0].requires_grad_(step > 5)
            x, y = batch(0, step)
            F.cross_entropy(m(x), y).backward()
            for o in (first, second):
                o.step()
            m.zero_grad()

    made = []
    for _ in range(2):
        m, _ = net("sgd")
        m[2].requires_grad_(True)
        groups = [{"params": m[0].parameters()}, {"params": m[2].parameters()}]
        made.append((m, torch.optim.Adam(groups, lr=0.01), torch.optim.SGD(m[4].parameters(), lr=0.1, momentum=0.9)))
    with paraft.init(fleet) as run:
        run.prepare(made[0][0], list(made[0][1:]))
        play(*made[0])
    play(*made[1])
    assert apart(made[1][0].state_dict(), made[0][0].state_dict()) < 1e-5
