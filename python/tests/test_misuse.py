"""Invalid uses: an error or a log line, never a silently different result."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any, Optional

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from torch import nn  # noqa: E402

Prepared = tuple[paraft.Run, Any, Any]


def prepared(fleet: paraft.Fleet, **options: Any) -> Prepared:
    """A run with the MLP."""
    run = paraft.init(fleet)
    m = models.model("mlp")
    return run, *run.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1), **options)


def steps(m: Any, o: Any, n: int = 1) -> None:
    for batch in models.batches("mlp", 0, n):
        models.loss(m, batch).backward()
        o.step()
        o.zero_grad()


def test_a_scaler_does_not_hide_the_scripts_own_clipping(start_fleet: Callable[..., paraft.Fleet]) -> None:
    for clips in (False, True):
        run, m, o = prepared(start_fleet(1))
        before = nn.utils.parameters_to_vector(m.parameters()).detach().clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        (batch,) = models.batches("mlp", 0, 1)
        scaler.scale(models.loss(m, batch)).backward()
        scaler.unscale_(o)
        if clips:
            nn.utils.clip_grad_norm_(m.parameters(), 0.01)
        scaler.step(o)
        assert run.step == 1
        run.finish()
        moved = float((nn.utils.parameters_to_vector(m.parameters()) - before).norm())
        assert moved == pytest.approx(0.1 * 0.01, rel=1e-3) if clips else moved > 0.01


def test_names_that_cannot_be_recorded_are_refused(fleet: paraft.Fleet) -> None:
    run, m, o = prepared(fleet)
    with pytest.raises(paraft.MisuseError, match="`learning_rate` is recorded by itself"):
        run.log(learning_rate=0.1)
    run.log(**{f"value_{i}": float(i) for i in range(60)})
    with pytest.raises(paraft.MisuseError, match="at most 64 names"):
        run.log(**{f"other_{i}": float(i) for i in range(60)})
    steps(m, o)
    run.finish()


def test_what_is_trained_stays_so(fleet: paraft.Fleet) -> None:
    run, m, o = prepared(fleet)
    steps(m, o)
    m[0].weight.requires_grad_(False)
    with pytest.raises(paraft.MisuseError, match="`0.weight` is frozen and `0.bias` is not"):
        steps(m, o)
    m[0].weight.requires_grad_(True)
    steps(m, o)
    run.finish()


def test_a_run_that_is_over_says_so_and_what_it_was(fleet: paraft.Fleet) -> None:
    run, m, o = prepared(fleet)
    with pytest.raises(paraft.MisuseError, match="worker 0 of these servers already"):
        prepared(fleet)
    steps(m, o, 2)
    run.finish()
    assert run.stats()["step"] == run.step == 2 and run.mode == "bsp" and run.over
    with pytest.raises(paraft.MisuseError, match="is over"):
        steps(m, o)
    with pytest.raises(paraft.MisuseError, match="is over"):
        run.report(1, 1.0)
    with pytest.raises(paraft.MisuseError, match="is over"):
        run.prepare(m, o)
    with pytest.raises(paraft.MisuseError, match="trained their job to its end"):
        prepared(fleet)


def test_a_job_that_has_begun_is_gone_on_with_and_says_so(fleet: paraft.Fleet, caplog: pytest.LogCaptureFixture) -> None:
    run, m, o = prepared(fleet)
    steps(m, o, 2)
    run.close()
    with caplog.at_level(logging.WARNING, "paraft"):
        run, m, o = prepared(fleet)
    assert "the job is at step 2" in "".join(caplog.messages)
    steps(m, o)
    run.finish()


def test_second_training_thread_is_refused_and_first_continues(fleet: paraft.Fleet) -> None:
    run, m, o = prepared(fleet)
    steps(m, o)
    errors: list[BaseException] = []
    done = [0, 0]

    def trains(i: int) -> None:
        for _ in range(200):
            try:
                o.step()  # its gradients are zeros
                done[i] += 1
            except paraft.MisuseError as e:
                errors.append(e)

    threads = [threading.Thread(target=trains, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all("another thread" in str(e) for e in errors)
    assert sum(done) + len(errors) == 400 and run.step == 1 + sum(done)
    steps(m, o)
    run.finish()


def test_copies_are_torchs_own(fleet: paraft.Fleet) -> None:
    run, m, o = prepared(fleet)
    steps(m, o)
    m2, o2 = copy.deepcopy((m, o))
    m3, o3 = pickle.loads(pickle.dumps((m, o)))
    for m_, o_ in ((m2, o2), (m3, o3)):
        assert type(o_) is torch.optim.SGD
        before = m_[0].weight.detach().clone()
        steps(m_, o_)
        assert not torch.equal(before, m_[0].weight)
    assert run.step == 1
    run.finish()


@pytest.mark.parametrize("n", [5, 14])
def test_local_steps_behind_the_last_push_are_pushed_in_the_end(fleet: paraft.Fleet, n: int) -> None:
    plain = models.model("mlp")
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), n)
    run, m = paraft.init(fleet), models.model("mlp")
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    with paraft.torch.LocalSGD(run, m, o, every=10):
        steps(m, o, n)
    for a, b in zip(plain.parameters(), m.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_release_of_torch_that_is_too_old_is_refused() -> None:
    from paraft.torch import _release

    for release in ("1.13.1", "2.3.1+cu121"):
        with pytest.raises(paraft.ConfigError, match=f"torch {re.escape(release)} is older than 2.4"):
            _release.check(release)
    for release in ("2.4.0", "2.10.0a0+git1", "3.0"):
        _release.check(release)


def test_an_address_that_is_none_is_said_at_once() -> None:
    for servers in ("nohost:99x", "127.0.0.1", ":7000", "a:0", "a:70000"):
        with pytest.raises(paraft.ConfigError, match="host:port"):
            paraft.init(servers=servers)


def test_what_no_optimizer_trains_is_refused(fleet: paraft.Fleet) -> None:
    both = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    of_g = torch.optim.SGD(both["g"].parameters(), lr=0.1)
    with pytest.raises(paraft.ConfigError, match=r"`d\.weight` requires a gradient .*requires_grad_\(False\)"):
        paraft.init(fleet).prepare(both, of_g)
    both["d"].requires_grad_(False)
    run = paraft.init(fleet)
    run.prepare(both, of_g)
    run.close()


class Masked(nn.Module):
    """With a mask among its buffers, as transformers that are written by hand have it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.model("mlp")
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_a_buffer_of_infinities_is_each_workers_own(fleet: paraft.Fleet) -> None:
    run = paraft.init(fleet)
    m = Masked()
    m, o = run.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1))
    steps(m, o, 3)
    run.finish()
    assert torch.equal(m.mask, torch.full((3, 3), float("-inf")).triu(1))


def test_a_module_without_shapes_is_named(fleet: paraft.Fleet) -> None:
    m = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(paraft.ConfigError, match=r"`0\.weight` has no shape yet"):
        paraft.init(fleet).prepare(m, torch.optim.SGD(m.parameters(), lr=0.1))


def scales(servers: list[str], rank_of_infinity: int) -> list[list[float]]:
    """A worker whose own optimizer is scaled, and whose gradients are not finite once."""
    run = paraft.init(servers=servers)
    m = models.model("mlp")
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    m, o = run.prepare(m, o, apply="worker")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1_000)
    for i, batch in enumerate(models.batches("mlp", run.rank, 6)):
        loss = models.loss(m, batch) * (float("inf") if i == 2 and run.rank == rank_of_infinity else 1.0)
        scaler.scale(loss).backward()
        scaler.step(o)
        scaler.update()
        o.zero_grad()
    assert run.step == 6, "a step that is skipped counts"
    run.finish()
    return [p.reshape(-1).tolist() for p in m.parameters()]


def test_a_scaler_that_skips_a_workers_own_step_shifts_no_round(
    fleet: paraft.Fleet, run_workers: Callable[..., Any]
) -> None:
    ours, theirs = run_workers(fleet, scales, 2, fleet.servers, 1, timeout=60).values
    assert ours == theirs
    # By hand: the mean of both workers' changes, one of which is zero in one step.
    m = models.model("mlp")
    batches = list(zip(models.batches("mlp", 0, 6), models.batches("mlp", 1, 6)))
    for i, of_both in enumerate(batches):
        for rank, batch in enumerate(of_both):
            if (i, rank) != (2, 1):
                (models.loss(m, batch) / 2).backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
        m.zero_grad()
    for mine, p in zip(ours, m.parameters()):
        assert torch.allclose(torch.tensor(mine), p.reshape(-1), atol=1e-5)


def test_leased_data_says_what_it_goes_with(start_fleet: Callable[..., paraft.Fleet]) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(96, 20), torch.zeros(96, dtype=torch.long))
    run = paraft.init(start_fleet(1))
    paraft.torch.LeasedLoader(run, data, batch_size=8, epochs=1)
    m = models.model("mlp")
    with pytest.raises(paraft.ConfigError, match="leased data goes with the servers' optimizer"):
        paraft.torch.LocalSGD(run, m, models.optimizer("sgd", m))
    run = paraft.init(start_fleet(1))
    loader = paraft.torch.LeasedLoader(run, data, batch_size=8, epochs=1)
    m, o = run.prepare(m, models.optimizer("sgd", m))
    with pytest.raises(paraft.MisuseError, match="accumulated"):
        for i, batch in enumerate(loader):
            models.loss(m, batch).backward()
            if i % 2:
                o.step()
                o.zero_grad()
    run.close()


@pytest.mark.parametrize("overlap", [None, True])
def test_clipping_that_begins_later_is_done_or_named(overlap: Optional[bool], fleet: paraft.Fleet) -> None:
    run, m, o = prepared(fleet, overlap=overlap)
    steps(m, o, 3)
    (batch,) = models.batches("mlp", 0, 1)
    models.loss(m, batch).backward()
    before = nn.utils.parameters_to_vector(m.parameters()).detach().clone()
    if overlap:
        with pytest.raises(paraft.MisuseError, match="pushed already: .*overlap=False"):
            nn.utils.clip_grad_norm_(m.parameters(), 0.01)
    else:
        nn.utils.clip_grad_norm_(m.parameters(), 0.01)
    o.step()
    o.zero_grad()
    moved = float((nn.utils.parameters_to_vector(m.parameters()) - before).norm())
    assert overlap or moved == pytest.approx(0.1 * 0.01, rel=1e-3)
    steps(m, o, 20)
    run.finish()


def test_a_rate_is_set_before_early_pushes_or_refused(fleet: Any) -> None:
    """Gradients that leave during the backward pass carry the options of that time."""
    plain, m = models.model("mlp"), models.model("mlp")
    theirs, o = torch.optim.SGD(plain.parameters(), lr=0.1), torch.optim.SGD(m.parameters(), lr=0.1)
    run = paraft.init(fleet)
    run.prepare(m, o, overlap=True)
    for i, batch in enumerate(models.batches("mlp", 0, 6)):
        for model, optimizer in ((plain, theirs), (m, o)):
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            models.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain.parameters(), m.parameters()))
    models.loss(m, batch).backward()
    o.param_groups[0]["lr"] = 0.5
    with pytest.raises(paraft.MisuseError, match="between backward\\(\\) and optimizer.step"):
        o.step()
    run.close()
