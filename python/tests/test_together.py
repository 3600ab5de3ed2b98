"""Several optimizers in one run: each steps by itself, as under DDP."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from models import SMALL_BUCKETS  # noqa: E402
from paraft.errors import ConfigError, MisuseError  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

torch.set_num_threads(1)
STEPS = 40


def gan() -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
    """A generator, a discriminator with statistics of its batches, and optimizers of two kinds."""
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    d = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return g, d, [torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.999)), torch.optim.SGD(d.parameters(), lr=0.05, momentum=0.5)]


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(16, 4, generator=draw) * 0.5 + 1.0, torch.randn(16, 8, generator=draw)


def play(g: nn.Module, d: nn.Module, optimizers: list[torch.optim.Optimizer], rank: int, steps: int = STEPS, **wait: float) -> None:
    """The discriminator steps twice for each step of the generator, whose loss leaves gradients in the discriminator too."""
    of_g, of_d = optimizers
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
    for step in range(steps):
        real, noise = batch(rank, step)
        of_d.zero_grad()
        loss = F.binary_cross_entropy_with_logits(d(real), ones) + F.binary_cross_entropy_with_logits(d(g(noise).detach()), zeros)
        loss.backward()
        of_d.step()
        if step % 2 == 0:
            of_g.zero_grad()
            F.binary_cross_entropy_with_logits(d(g(noise)), ones).backward()
            of_g.step()
        time.sleep(wait.get("pause", 0))


def by_ddp(out: str) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    g, d, optimizers = gan()
    play(nn.parallel.DistributedDataParallel(g, broadcast_buffers=False), nn.parallel.DistributedDataParallel(d), optimizers, rank)
    torch.save({"g": g.state_dict(), "d": d.state_dict()}, f"{out}/ddp {rank}.pt")
    torch.distributed.destroy_process_group()


def trained(out: str, mode: str = "bsp", pause: float = 0.0) -> dict[str, Any]:
    with paraft.init(mode=mode, settings=SMALL_BUCKETS) as run:
        g, d, optimizers = gan()
        (g, d), optimizers = run.prepare([g, d], optimizers)
        play(g, d, optimizers, run.rank, pause=pause)
        stats = run.stats()
    torch.save({"g": g.state_dict(), "d": d.state_dict()}, f"{out}/paraft {run.rank}.pt")
    return {**stats, "step": run.step}


def apart(a: Any, b: Any) -> float:
    """The largest difference of trained values, in parts of the largest."""
    worst = 0.0
    for part in ("g", "d"):
        for name, value in a[part].items():
            if value.is_floating_point() and "running" not in name:
                worst = max(worst, float((value - b[part][name]).abs().max() / value.abs().max()))
    return worst


def ends(out: Path) -> tuple[Any, Any]:
    one, two = (torch.load(out / f"paraft {rank}.pt") for rank in range(2))
    return one, two


def test_a_gan_on_two_workers_is_ddps(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    run_workers(None, by_ddp, 2, str(tmp_path))
    done = run_workers(start_fleet(3), trained, 2, str(tmp_path)).values
    one, two = ends(tmp_path)
    assert apart(one, two) == 0
    assert apart(torch.load(tmp_path / "ddp 0.pt"), one) < 1e-5
    assert [d["step"] for d in done] == [STEPS + STEPS // 2] * 2
    assert [d["skipped"] for d in done] == [0, 0], "what another optimizer trains is not skipped"


def test_a_gan_trains_in_asynchronous_mode(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    run_workers(start_fleet(1), trained, 2, str(tmp_path), "asp")
    one, two = ends(tmp_path)
    assert apart(one, two) == 0
    assert apart(dict(zip("gd", (m.state_dict() for m in gan()[:2]))), one) > 1e-3


def test_a_gan_survives_the_loss_of_a_server(start_fleet: Any, start_workers: Any, run_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    workers = start_workers(fleet, trained, 2, str(tmp_path), "bsp", 0.05)
    time.sleep(3)
    fleet._processes[0].kill()
    workers.wait(180)
    run_workers(None, by_ddp, 2, str(tmp_path))
    one, two = ends(tmp_path)
    assert apart(one, two) == 0
    assert apart(torch.load(tmp_path / "ddp 0.pt"), one) < 1e-5


def clipped(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], rank: int) -> list[float]:
    """One backward pass for both; each is clipped by its own bounds or both together, before the steps or between them, and scaled."""
    (g, d), (of_g, of_d) = models, optimizers
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    norms: list[float] = []
    for step in range(18):
        real, noise = batch(rank, step)
        losses = [g(noise).square().mean(), d(real).square().mean()]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step % 3 == 2:
            scaler.scale(losses[0] * (float("inf") if step == 5 and rank == 1 else 1.0) + losses[1]).backward()
            for model, optimizer in zip(models, optimizers):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if step < 6:
                    scaler.step(optimizer)
            for optimizer in optimizers if step >= 6 else []:
                scaler.step(optimizer)
            scaler.update()
            norms.append(scaler.get_scale())
            continue
        sum(losses).backward()
        if step > 12:
            norms.append(float(nn.utils.clip_grad_norm_([*g.parameters(), *d.parameters()], 0.1 if step % 2 else 0.05)))
            of_d.step()
            of_g.step()
        elif step > 9:
            nn.utils.clip_grad_value_([*g.parameters(), *d.parameters()], 0.001)
            of_d.step()
            of_g.step()
        elif step > 6:
            norms.append(float(nn.utils.clip_grad_norm_(g.parameters(), 0.1)))
            if step % 2:
                norms.append(float(nn.utils.clip_grad_norm_(d.parameters(), 0.05)))
            of_d.step()
            of_g.step()
        elif step % 3:
            nn.utils.clip_grad_value_(g.parameters(), 0.001)
            nn.utils.clip_grad_value_(d.parameters(), 0.02)
            of_d.step()
            of_g.step()
        else:
            nn.utils.clip_grad_norm_(g.parameters(), 0.1)
            of_g.step()
            nn.utils.clip_grad_norm_(d.parameters(), 0.05)
            of_d.step()
    return norms


def clips(out: str, servers: list[str]) -> list[float]:
    g, d, optimizers = gan()
    run = paraft.init(servers=servers, settings=SMALL_BUCKETS)
    run.prepare([g, d], optimizers)
    norms = clipped([g, d], optimizers, run.rank)
    run.finish()
    torch.save({"g": g.state_dict(), "d": d.state_dict()}, f"{out}/paraft {run.rank}.pt")
    return norms


def clips_by_ddp(out: str) -> list[float]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    g, d, optimizers = gan()
    norms = clipped([nn.parallel.DistributedDataParallel(m, broadcast_buffers=False) for m in (g, d)], optimizers, rank)
    torch.save({"g": g.state_dict(), "d": d.state_dict()}, f"{out}/ddp {rank}.pt")
    torch.distributed.destroy_process_group()
    return norms


def test_several_optimizers_are_clipped_as_under_ddp(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    theirs = run_workers(None, clips_by_ddp, 2, str(tmp_path)).values
    ours = run_workers(None, clips, 2, str(tmp_path), start_fleet(3).servers).values
    assert ours == [pytest.approx(norms, rel=1e-5) for norms in theirs], "norms, and scales behind an infinity of one worker"
    one, two = ends(tmp_path)
    assert apart(one, two) == 0
    assert apart(torch.load(tmp_path / "ddp 0.pt"), one) < 1e-5


def test_clips_of_several_optimizers_that_cannot_be_are_said(fleet: Any) -> None:
    g, d, (of_g, of_d) = gan()
    run = paraft.init(fleet)
    run.prepare([g, d], [of_g, of_d])
    real, noise = batch(0, 0)
    (g(noise).square().mean() + d(real).square().mean()).backward()
    with pytest.raises(MisuseError, match="without `1.0.weight`.*nothing else does it"):
        nn.utils.clip_grad_norm_(list(d.parameters())[1:], 1.0)
    nn.utils.clip_grad_norm_(g.parameters(), 1.0)
    with pytest.raises(MisuseError, match="alone, and of it together with another one"):
        nn.utils.clip_grad_norm_([*g.parameters(), *d.parameters()], 1.0)
    nn.utils.clip_grad_norm_(d.parameters(), 1.0)
    with pytest.raises(MisuseError, match="clip each at once, then step"):
        nn.utils.clip_grad_norm_(g.parameters(), 1.0)
    of_d.step()
    of_d.zero_grad()
    of_g.zero_grad()
    (g(noise).square().mean() + d(real).square().mean()).backward()
    of_d.step()
    with pytest.raises(MisuseError, match="did not follow before other gradients"):
        of_g.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(d(real).square().mean()).backward()
    nn.utils.clip_grad_value_(d.parameters(), 1.0)
    with pytest.raises(MisuseError, match="call scaler.unscale_"):
        scaler.step(of_d)
    run.close()


def test_states_of_several_optimizers_are_saved_and_loaded(start_fleet: Any, tmp_path: Path) -> None:
    def stepped(resume: bool) -> tuple[Any, Any]:
        run = paraft.init(start_fleet(1), settings={"checkpoint.dir": str(tmp_path), **SMALL_BUCKETS}, resume=str(tmp_path) if resume else None)
        g, d, optimizers = gan()
        run.prepare([g, d], optimizers)
        play(g, d, optimizers, 0, 10)
        folder = run.save()
        own = [o.state_dict() for o in optimizers]
        run.finish()
        return own, paraft.torch.load_checkpoint(folder)

    g, d, optimizers = gan()
    play(g, d, optimizers, 0, 10)
    own, saved = stepped(resume=False)
    for plain, asked, read in zip((o.state_dict() for o in optimizers), own, saved["optimizer"]):
        for i, entry in plain["state"].items():
            for name, value in entry.items():
                assert torch.allclose(torch.as_tensor(value), torch.as_tensor(asked["state"][i][name]), atol=1e-6), name
                assert torch.allclose(torch.as_tensor(value), torch.as_tensor(read["state"][i][name]), atol=1e-6), name
    play(g, d, optimizers, 0, 10)
    own, _ = stepped(resume=True)
    for plain, asked in zip((o.state_dict() for o in optimizers), own):
        for i, entry in plain["state"].items():
            for name, value in entry.items():
                assert torch.allclose(torch.as_tensor(value), torch.as_tensor(asked["state"][i][name]), atol=1e-5), name


def test_what_was_loaded_before_goes_on(fleet: Any) -> None:
    plain, ours = gan(), gan()
    play(*plain[:2], plain[2], 0, 10)
    play(*ours[:2], ours[2], 0, 10)
    with paraft.init(fleet) as run:
        run.prepare({"g": ours[0], "d": ours[1]}, ours[2])
        play(*ours[:2], ours[2], 0, 10)
    play(*plain[:2], plain[2], 0, 10)
    for a, b in zip((plain[0], plain[1]), (ours[0], ours[1])):
        for name, p in a.named_parameters():
            assert torch.allclose(p, b.get_parameter(name), atol=1e-5), name


def out_of_order(servers: list[str]) -> str:
    run = paraft.init(servers=servers)
    g, d, (of_g, of_d) = gan()
    run.prepare([g, d], [of_g, of_d])
    _, noise = batch(run.rank, 0)
    d(g(noise)).sum().backward()
    (of_g if run.rank == 0 else of_d).step()
    return "both"


def test_workers_that_step_in_another_order_are_told(fleet: Any, start_workers: Any) -> None:
    workers = start_workers(None, out_of_order, 2, fleet.servers)
    assert [w.wait() != 0 for w in workers] == [True, True]
    assert all("in the same order" in w.err for w in workers), [w.said() for w in workers]


def test_what_cannot_be_is_said(fleet: Any) -> None:
    g, d, (of_g, of_d) = gan()
    run = paraft.init(fleet)
    with pytest.raises(ConfigError, match="in no parameter group"):
        run.prepare([g, d], [of_g])
    with pytest.raises(ConfigError, match="twice"):
        run.prepare([g, d], [of_g, of_g])
    with pytest.raises(ConfigError, match="a parameter is one's"):
        run.prepare([g, d], [of_g, of_d, torch.optim.SGD(d.parameters(), lr=0.1)])
    with pytest.raises(ConfigError, match="LBFGS is none of the servers'.*cannot run on the mean"):
        run.prepare([g, d], [of_g, torch.optim.LBFGS(d.parameters())])
    run.close()
