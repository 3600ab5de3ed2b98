"""Training PyTorch models: what comes out, beside DDP's and one process's."""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from conftest import recorded_loss  # noqa: E402
from torch import nn  # noqa: E402

STEPS = 50
#: Such that the small models have several.
SMALL_BUCKETS = {"settings": {"cluster.bucket_bytes": 1024}}


#: What is trained in lock-step, beside DDP: its name, model and optimizer, options of ``prepare`` and of ``init``, the norm at which
#: DDP's loop clips, how many servers, and how far apart the weights may be, of the largest one.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], float, int, float]] = {
    **{name: ("mlp", name, {"apply": "servers"}, {}, 0.0, 1, within) for name, (_, within) in models.OPTIMIZERS.items()},
    "three servers": ("mlp", "sgd", {}, {}, 0.0, 3, 2e-7),
    "conv": ("conv", "momentum", {}, {}, 0.0, 1, 2e-6),
    # What divides by the root of a gradient's square makes much of one that is nothing but rounding, as that of the keys' bias.
    "transformer": ("transformer", "adamw", {}, {}, 0.0, 1, 2e-3),
    "at step()": ("mlp", "momentum", {"overlap": False}, SMALL_BUCKETS, 0.0, 1, 1e-6),
    "during backward": ("mlp", "momentum", {"overlap": True}, SMALL_BUCKETS, 0.0, 1, 1e-6),
    # clip_grad_norm_ divides by the norm plus 1e-6.
    "clipped": ("mlp", "sgd", {"clip_norm": 0.1}, {}, 0.1, 1, 1e-5),
}


def trained(out: str, fleets: dict[str, list[str]], more: dict[str, Any]) -> dict[str, float]:
    """A worker that trains all cases, each on servers of its own; the largest move of a weight in each."""
    moved = {}
    for case, servers in fleets.items():
        kind, optimizer, options, env, *_ = CASES[case]
        run = paraft.init(servers=servers, **env, **more)
        m = models.model(kind, seed=run.rank)  # worker 0's count
        first = [p.detach().clone() for p in models.model(kind).parameters()]
        m, o = run.prepare(m, models.optimizer(optimizer, m), **options)
        for batch in models.batches(kind, run.rank, STEPS):
            models.loss(m, batch).backward()
            o.step()
            o.zero_grad()
        run.finish()
        torch.save(m.state_dict(), f"{out}/{case} {run.rank}.pt")
        moved[case] = max(float((a - b).detach().abs().max()) for a, b in zip(first, m.parameters()))
    return moved


def trained_by_ddp(out: str) -> None:
    """The same loops under DistributedDataParallel."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for case, (kind, optimizer, _, _, clip, *_) in CASES.items():
        m = models.model(kind, seed=rank)
        ddp = nn.parallel.DistributedDataParallel(m, broadcast_buffers=False)
        o = models.optimizer(optimizer, m)
        for batch in models.batches(kind, rank, STEPS):
            models.loss(ddp, batch).backward()
            if clip:
                nn.utils.clip_grad_norm_(m.parameters(), clip)
            o.step()
            o.zero_grad()
        torch.save(m.state_dict(), f"{out}/{case} ddp-{rank}.pt")
    torch.distributed.destroy_process_group()


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference, of the largest weight."""
    assert a.keys() == b.keys()
    floats = [k for k in a if a[k].is_floating_point() and "running" not in k]
    largest = max(float(b[k].abs().max()) for k in floats)
    return max(float((a[k] - b[k]).abs().max()) for k in floats) / largest


def test_lock_step_gives_the_weights_of_ddp(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    out = str(tmp_path)
    fleets = {case: start_fleet(servers).servers for case, (*_, servers, _) in CASES.items()}
    moved = run_workers(None, trained, 2, out, fleets, {}, timeout=300).values
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run_workers(None, trained_by_ddp, 2, out, env=env, timeout=300)
    ends = {}
    for case, (*_, within) in CASES.items():
        ours, other, theirs, another = [torch.load(f"{out}/{case} {who}.pt") for who in ("0", "1", "ddp-0", "ddp-1")]
        ends[case] = ours
        assert all(torch.equal(ours[k], other[k]) for k in ours if "num_batches" not in k), f"{case}: both end with the same"
        assert min(m[case] for m in moved) > 0.01, f"{case}: it trains"
        assert apart(ours, theirs) <= within, case
        for key in ours:
            if "running" in key:
                assert torch.allclose(ours[key], (theirs[key] + another[key]) / 2, atol=1e-5), "the mean of the workers'"
    early, late = ends["during backward"], ends["at step()"]
    assert all(torch.equal(early[k], late[k]) for k in early), "pushed early or late: the same bits"


def test_other_modes_train(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    for mode in ("ssp:2", "asp"):
        fleets = {"adam": start_fleet(1).servers}
        moved = run_workers(None, trained, 2, str(tmp_path), fleets, {"mode": mode}, timeout=240).values
        assert min(m["adam"] for m in moved) > 0.01
        ours = [torch.load(tmp_path / f"adam {rank}.pt") for rank in range(2)]
        assert all(torch.equal(ours[0][k], ours[1][k]) for k in ours[0]), "final weights are the same"


def alone(fleet: Any, optimizer: Any, prepare: Callable[..., Any], steps: int = 40, **env: Any) -> tuple[nn.Module, nn.Module]:
    """The only worker of a job, and a plain loop beside it: both models."""
    run = paraft.init(fleet, **env)
    m, plain = models.model("mlp"), models.model("mlp")
    o, po = optimizer(m.parameters()), optimizer(plain.parameters())
    held = prepare(run, m, o)
    for batch in models.batches("mlp", 0, steps):
        for one, its in ((m, o), (plain, po)):
            models.loss(one, batch).backward()
            its.step()
            its.zero_grad()
    run.finish()
    del held
    return m, plain


def same(m: nn.Module, plain: nn.Module, within: float) -> None:
    assert apart(m.state_dict(), plain.state_dict()) <= within


@pytest.mark.parametrize("apply", ["servers", "worker"])
def test_loss_without_a_call_is_the_sum_that_a_step_uses(apply: str, fleet: Any, tmp_path: Path) -> None:
    run = paraft.init(fleet, run_dir=str(tmp_path))
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o, apply=apply)
    losses = []
    for x, y in models.batches("mlp", 0, 12):
        models.loss(m, (x, y)).backward()
        o.zero_grad()  # throws it away
        halves = [models.loss(m, (x[half], y[half])) / 2 for half in (slice(8), slice(8, 16))]
        with run.no_sync():
            halves[0].backward()
        halves[1].backward()
        losses.append(sum(half.item() for half in halves))
        o.step()
        o.zero_grad()
    run.finish()
    loss, steps = recorded_loss(tmp_path)
    assert steps > 0 and loss == pytest.approx(sum(losses[:steps]) / steps, abs=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adadelta, torch.optim.Rprop, torch.optim.ASGD])
def test_any_optimizer_runs_on_a_worker(kind: Any, fleet: Any) -> None:
    m, plain = alone(fleet, kind, lambda run, m, o: run.prepare(m, o, apply="worker"))
    same(m, plain, 1e-5)


def test_local_steps_equal_inner_optimizer_until_pushed(fleet: Any) -> None:
    m, plain = alone(fleet, lambda p: torch.optim.NAdam(p, lr=0.01), lambda run, m, o: paraft.torch.LocalSGD(run, m, o, every=10))
    same(m, plain, 1e-5)


def outer(x: nn.Module, steps: int, every: int, lr: float, momentum: float) -> None:
    """DiLoCo with one worker, by its formulas: Nesterov's step along what the inner steps went."""
    inner = torch.optim.AdamW(x.parameters(), lr=1e-3)
    center = [p.detach().clone() for p in x.parameters()]
    velocity = [torch.zeros_like(p) for p in center]
    for i, batch in enumerate(models.batches("mlp", 0, steps), 1):
        models.loss(x, batch).backward()
        inner.step()
        inner.zero_grad()
        if i % every:
            continue
        with torch.no_grad():
            for c, v, p in zip(center, velocity, x.parameters()):
                d = c - p
                v.mul_(momentum).add_(d)
                c.sub_(lr * (d + momentum * v))
                p.copy_(c)


def test_diloco_is_its_formulas(fleet: Any) -> None:
    plain = models.model("mlp")
    outer(plain, 40, 10, 0.7, 0.9)
    m, _ = alone(fleet, lambda p: torch.optim.AdamW(p, lr=1e-3), lambda run, m, o: paraft.torch.DiLoCo(run, m, o, every=10))
    same(m, plain, 1e-5)


#: Of 1994 values in buckets of 256.
STREAM = {"every": 6, "fragments": 3}
TURNS = {2: (0, 512), 4: (512, 1280), 0: (1280, 1994)}


def streaming(out: str) -> None:
    run = paraft.init(settings={"cluster.bucket_bytes": 1024})
    m = models.model("mlp")
    o = torch.optim.AdamW(m.parameters(), lr=1e-3)
    with paraft.torch.DiLoCo(run, m, o, **STREAM):  # type: ignore[arg-type]
        for batch in models.batches("mlp", run.rank, 24):
            models.loss(m, batch).backward()
            o.step()
            o.zero_grad()
    torch.save(m.state_dict(), f"{out}/{run.rank}.pt")


def streamed(steps: int) -> Any:
    """Streaming DiLoCo of two workers by its formulas: the center."""
    own = [models.model("mlp") for _ in range(2)]
    inner = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in own]
    flat = torch.nn.utils.parameters_to_vector
    center = flat(own[0].parameters()).detach().clone()
    taken = center.clone()  # as the workers have taken it over
    velocity = torch.zeros_like(center)
    for i, pair in enumerate(zip(*(models.batches("mlp", rank, steps) for rank in range(2))), 1):
        for m, o, batch in zip(own, inner, pair):
            models.loss(m, batch).backward()
            o.step()
            o.zero_grad()
        with torch.no_grad():
            x = [flat(m.parameters()).clone() for m in own]
            if i % 6 in TURNS:
                part = slice(*TURNS[i % 6])
                d = sum(taken[part] - values[part] for values in x) / 2
                velocity[part] = 0.9 * velocity[part] + d
                center[part] -= 0.7 * (d + 0.9 * velocity[part])
                for values in (*x, taken):
                    values[part] = center[part]
            for m, values in zip(own, x):
                torch.nn.utils.vector_to_parameters(values, m.parameters())
    return center


def test_streaming_diloco_is_its_formulas(fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    run_workers(fleet, streaming, 2, str(tmp_path))
    expected = models.model("mlp")
    first = {k: v.clone() for k, v in expected.state_dict().items()}
    torch.nn.utils.vector_to_parameters(streamed(24), expected.parameters())
    assert apart(first, expected.state_dict()) > 1e-2, "it trains"
    for rank in range(2):
        assert apart(torch.load(tmp_path / f"{rank}.pt"), expected.state_dict()) < 1e-5


def test_accumulated_gradients_are_pushed_once(start_fleet: Any) -> None:
    for overlap in (False, True):
        run = paraft.init(start_fleet(1))
        m, plain = models.model("mlp"), models.model("mlp")
        o, po = models.optimizer("sgd", m), models.optimizer("sgd", plain)
        run.prepare(m, o, overlap=overlap)
        for i, batch in enumerate(models.batches("mlp", 0, 20)):
            (models.loss(plain, batch) / 2).backward()
            if i % 2 == 0:
                with run.no_sync():
                    (models.loss(m, batch) / 2).backward()
                continue
            (models.loss(m, batch) / 2).backward()
            for one in (o, po):
                one.step()
                one.zero_grad()
        assert run.step == 10
        same(m, plain, 2e-7)
        run.finish()


def test_frozen_unused_tied_and_strided_parameters(fleet: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(20, 20)
            self.frozen = nn.Linear(20, 20)
            self.unused = nn.Linear(20, 20)
            self.tied = nn.Linear(20, 20)
            self.tied.weight = self.a.weight
            self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
            self.low = nn.Parameter(torch.ones(20, dtype=torch.bfloat16))
            self.frozen.requires_grad_(False)

        def forward(self, x: Any) -> Any:
            x = self.tied(torch.relu(self.frozen(self.a(x)))) * self.low.float()
            return x[:, :10] + self.conv(x[:, None, :9].unflatten(2, (3, 3))).mean((1, 2, 3))[:, None]

    run = paraft.init(fleet)
    torch.manual_seed(0)
    m = Net()
    torch.manual_seed(0)
    plain = Net()
    o, po = (torch.optim.SGD([p for p in x.parameters() if p.requires_grad], lr=0.05) for x in (m, plain))
    before = m.frozen.weight.clone()
    run.prepare(m, o)
    for batch in models.batches("mlp", 0, 20):
        for one, its in ((m, o), (plain, po)):
            models.loss(one, batch).backward()
            its.step()
            its.zero_grad()
    assert torch.equal(m.frozen.weight, before) and m.tied.weight is m.a.weight
    assert m.conv.weight.is_contiguous(memory_format=torch.channels_last)
    run.finish()
    # The servers keep float32 of what is bfloat16 here.
    for name, p in plain.named_parameters():
        within = 2e-2 if name == "low" else 5e-3
        assert torch.allclose(m.get_parameter(name), p, atol=within), name


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.5),
    "warm-up": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 20),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 7),
    "each its own": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda i: 1 / (1 + i), lambda i: 0.9**i]),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=30),
    "decay": lambda o: Decay(o),
}
GROUPED: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.005, eps=1e-4),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.005, eps=1e-4),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.005, momentum=0.9),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.005, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.005, momentum=0.9, eps=1e-4),
}


class Decay:
    """A cosine of the weight decay, as some papers have it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.step_count = optimizer, 0

    def step(self) -> None:
        self.step_count += 1
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.2 * (1 + math.cos(self.step_count / 10))


@pytest.mark.parametrize("scheduler, optimizer", [(s, "adamw") for s in SCHEDULERS] + [("one cycle", o) for o in GROUPED])
def test_groups_and_any_scheduler_act_on_the_servers(scheduler: str, optimizer: str, fleet: Any) -> None:
    run = paraft.init(fleet)
    both = []
    for _ in range(2):
        m = models.model("mlp")
        decay = [p for p in m.parameters() if p.ndim > 1]
        rest = [p for p in m.parameters() if p.ndim == 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
        o = GROUPED[optimizer](groups)
        both.append((m, o, SCHEDULERS[scheduler](o)))
    run.prepare(both[0][0], both[0][1], apply="servers")
    for batch in models.batches("mlp", 0, 30):
        for m, o, s in both:
            models.loss(m, batch).backward()
            o.step()
            o.zero_grad()
            s.step()
    same(both[0][0], both[1][0], 1e-5)
    run.finish()


@pytest.mark.parametrize("overlap", [True, False])
def test_each_step_has_the_rate_that_its_scheduler_set(overlap: bool, fleet: Any) -> None:
    run = paraft.init(fleet, settings={"cluster.bucket_bytes": 1024})
    m, plain = models.model("mlp"), models.model("mlp")
    both = []
    for model in (m, plain):
        o = torch.optim.SGD(model.parameters(), lr=0.5)
        both.append((model, o, torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1.0 if i % 2 else 0.1)))
    run.prepare(m, both[0][1], apply="servers", overlap=overlap)
    for batch in models.batches("mlp", 0, 10):
        for model, o, schedule in both:
            models.loss(model, batch).backward()
            o.step()
            o.zero_grad()
            schedule.step()
    same(m, plain, 1e-6)
    if overlap:
        models.loss(m, batch).backward()
        both[0][2].step()
        with pytest.raises(paraft.MisuseError, match="lr|options"):
            both[0][1].step()
    run.close()


def test_each_group_has_options_of_its_own(fleet: Any) -> None:
    def make(m: nn.Module) -> torch.optim.Optimizer:
        first, second = list(m.parameters())[:2], list(m.parameters())[2:]
        groups = [{"params": first}, {"params": second, "betas": (0.5, 0.9), "eps": 1e-3, "lr": 0.02, "amsgrad": True}]
        return torch.optim.AdamW(groups, lr=0.005, eps=1e-4)

    m, plain = models.model("mlp"), models.model("mlp")
    run = paraft.init(fleet)
    both = [(m, make(m)), (plain, make(plain))]
    run.prepare(m, both[0][1], apply="servers")
    for batch in models.batches("mlp", 0, 30):
        for model, o in both:
            models.loss(model, batch).backward()
            o.step()
            o.zero_grad()
    same(m, plain, 1e-5)
    states = [o.state_dict()["state"] for _, o in both]
    assert [sorted(entry) for entry in states[0].values()] == [sorted(entry) for entry in states[1].values()]
    assert torch.allclose(states[0][3]["max_exp_avg_sq"], states[1][3]["max_exp_avg_sq"], atol=1e-6)
    run.finish()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adadelta(p, lr=1.0),
        lambda p: torch.optim.Adamax(p, lr=0.01),
        lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-4),
        lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-4),
        lambda p: torch.optim.Adam(p, lr=0.005, eps=1e-4, amsgrad=True, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.005, eps=1e-4, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.005, eps=1e-4, maximize=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5, weight_decay=0.1, maximize=True),
    ],
)
def test_more_optimizers_on_the_servers(make: Any, fleet: Any) -> None:
    m, plain = alone(fleet, make, lambda run, m, o: run.prepare(m, o, apply="servers"))
    same(m, plain, 1e-4)


def scaled(out: str, mode: str) -> int:
    """Half precision's loop, whose scaler meets infinities: at first, and at one step of worker 1's own."""
    run = paraft.init(mode=mode)
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10_000)
    for i, batch in enumerate(models.batches("mlp", run.rank, 12)):
        loss = models.loss(m, batch)
        if i == 5 and run.rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(o)
        scaler.update()
        o.zero_grad()
    assert run.step == 12
    skipped = run.stats()["skipped"]
    run.finish()
    torch.save(m.state_dict(), f"{out}/{run.rank}.pt")
    return int(skipped)


def test_a_step_that_a_scaler_skips_is_skipped_by_all(fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    assert run_workers(fleet, scaled, 2, str(tmp_path), "bsp", timeout=180).values == [1, 1]
    plain = models.model("mlp")
    o = models.optimizer("sgd", plain)
    for i, pair in enumerate(zip(*(models.batches("mlp", rank, 12) for rank in range(2)))):
        if i == 5:
            continue
        for batch in pair:
            (models.loss(plain, batch) / 2).backward()
        o.step()
        o.zero_grad()
    a, b = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert apart(a, plain.state_dict()) < 1e-6


def leased(out: str, workers: int, wait_at: int) -> None:
    """A worker that trains leased chunks, and writes down which samples; at its batch ``wait_at`` it waits to be killed."""
    run = paraft.init(mode="asp")
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    data = torch.utils.data.TensorDataset(torch.arange(600), torch.randn(600, 20), torch.zeros(600, dtype=torch.long))
    sampler = paraft.torch.LeasedSampler(run, data, batch_size=10, epochs=2)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    run.prepare(m, o)
    n = 0
    with open(f"{out}/{run.rank}.txt", "a") as seen:
        for epoch in range(2):
            for i, x, y in loader:
                models.loss(m, (x, y)).backward()
                o.step()
                o.zero_grad()
                n += 1
                print(*(f"{epoch}:{k}" for k in i.tolist()), file=seen, flush=True)
                if run.rank == 1 and n == wait_at:
                    print("waits", flush=True)
                    import time

                    time.sleep(600)
    run.finish()


def leased_by(out: str, workers: int) -> None:
    """As ``leased``, with a stock ``DataLoader`` over the leased one."""
    run = paraft.init(mode="asp")
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    data = torch.utils.data.TensorDataset(torch.arange(605), torch.randn(605, 20), torch.zeros(605, dtype=torch.long))
    batches = paraft.torch.LeasedLoader(run, data, batch_size=10, epochs=2, num_workers=workers)
    assert isinstance(batches, torch.utils.data.IterableDataset)
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)
    run.prepare(m, o)
    with open(f"{out}/{run.rank}.txt", "a") as told:
        for epoch in range(2):
            for i, x, y in loader:
                models.loss(m, (x, y)).backward()
                o.step()
                o.zero_grad()
                print(*(f"{epoch}:{k}" for k in i.tolist()), file=told, flush=True)
    run.finish()


def seen(out: Path, ranks: int) -> Counter[str]:
    return Counter(k for r in range(ranks) for k in (out / f"{r}.txt").read_text().split())


def test_leased_samples_are_trained_exactly_once(fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    run_workers(fleet, leased, 2, str(tmp_path), 2, -1)
    assert seen(tmp_path, 2) == Counter({f"{e}:{i}": 1 for e in range(2) for i in range(600)})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stock_loader_takes_leased_batches(workers: int, fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    run_workers(fleet, leased_by, 2, str(tmp_path), workers)
    assert seen(tmp_path, 2) == Counter({f"{e}:{i}": 1 for e in range(2) for i in range(605)})


def test_stock_loader_with_own_workers_names_leased_loader(fleet: Any) -> None:
    run = paraft.init(fleet)
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    data = torch.utils.data.TensorDataset(torch.randn(60, 20), torch.zeros(60, dtype=torch.long))
    batches = paraft.torch.LeasedLoader(run, data, batch_size=10, epochs=1)
    run.prepare(m, o)
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(paraft.MisuseError, match="give num_workers to the LeasedLoader"):
        next(iter(loader))
    for batch in batches:  # and the run goes on
        models.loss(m, batch).backward()
        o.step()
        o.zero_grad()
    assert run.step == 6
    run.finish()


def test_what_a_killed_worker_held_is_trained_by_another(fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    workers = start_workers(fleet, leased, 2, str(tmp_path), 2, 5)
    workers[1].wait_for("waits")
    workers[1].kill()
    assert workers[0].wait(90) == 0, workers[0].said()
    counted = seen(tmp_path, 2)
    assert set(counted) == {f"{e}:{i}" for e in range(2) for i in range(600)}, "at least once"
    assert sum(counted.values()) - len(counted) <= 50, "again: what was trained of a chunk that nobody accounted for"


def test_a_view_is_pickled_without_the_rest(fleet: Any) -> None:
    import io

    run = paraft.init(fleet)
    m = models.model("mlp")
    run.prepare(m, models.optimizer("sgd", m))
    out = io.BytesIO()
    torch.save(m[2].bias, out)
    assert len(out.getvalue()) < 3_000
    run.finish()
