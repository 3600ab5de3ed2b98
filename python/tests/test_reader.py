"""Readers: whole versions of a job's weights in a process that does not train."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from paraft.errors import ConfigError, JobEndedError, VersionNotKeptError, VersionTimeoutError  # noqa: E402
from torch import nn  # noqa: E402

STEPS = 60


def model() -> nn.Module:
    torch.manual_seed(3)
    tied = nn.Linear(8, 8, bias=False)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), tied, nn.ReLU(), tied, nn.Linear(8, 1))


def trained(out: str) -> None:
    """A worker that notes its weights after each step."""
    run = paraft.init(name="read")
    m = model()
    m, o = run.prepare(m, torch.optim.SGD(m.parameters(), lr=0.05))
    history = {}
    for step in range(STEPS):
        torch.manual_seed(100 * step + run.rank)
        x = torch.randn(16, 4)
        (m(x) - x.sum(1, keepdim=True)).square().mean().backward()
        o.step()
        o.zero_grad()
        history[step + 1] = {name: t.clone() for name, t in m.state_dict().items()}
        time.sleep(0.03)
    if run.rank == 0:
        # Its own last step, as any reader sees it.
        assert run.reader(only="5.*").get(at_least=STEPS).step == STEPS == run.stats()["step"]
    run.finish()
    torch.save(history, f"{out}/{run.rank}.pt")


def test_readers_get_the_weights_of_each_step_whole(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    seen: dict[int, tuple[str, dict[str, Any]]] = {}
    failed: list[BaseException] = []

    def follow() -> None:
        try:
            reader = paraft.reader("read", fleet, timeout=60)
            fresh = model()
            addresses = [t.data_ptr() for t in fresh.state_dict().values()]
            for version in reader.watch(every=2, timeout=60):
                version.load_into(fresh)
                assert [t.data_ptr() for t in fresh.state_dict().values()] == addresses, "each tensor keeps its storage"
                seen[version.step] = version.digest, {name: t.clone() for name, t in fresh.state_dict().items()}
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=follow)
    thread.start()
    run_workers(fleet, trained, 2, str(tmp_path), timeout=200)
    thread.join()
    assert not failed, failed
    history = torch.load(tmp_path / "0.pt")
    assert list(seen) == sorted(seen) and len(seen) > 5, list(seen)
    assert max(seen) == STEPS, "the last version is that of the job's end"
    for step, (_, weights) in seen.items():
        if step:
            for name, t in weights.items():
                if "running" not in name:
                    assert torch.equal(t, history[step][name]) or name.endswith("tracked"), f"{name} at step {step}"
    # The job has ended: whoever asks gets its last version, from any replica, in any type.
    reader = paraft.reader("read", fleet)
    last = reader.get()
    assert (last.step, last.digest) == (STEPS, seen[STEPS][0])
    assert reader.get(exactly=STEPS).digest == last.digest
    half = paraft.reader("read", fleet, dtype="bf16", only=["0.*", "5.weight"])
    version = half.get()
    assert set(half.shapes) == {"0.weight", "0.bias", "5.weight"}
    for name, t in version.state_dict().items():
        assert torch.equal(t, last.state_dict()[name].to(torch.bfloat16)), name
        assert (version.arrays()[name] == t.float().numpy()).all()
    with pytest.raises(VersionNotKeptError, match="version 3 is not kept any more: the job is at 60"):
        reader.get(exactly=3)
    assert last.is_last and [version.step for version in reader.watch()] == [STEPS]
    for later in {"exactly": 61}, {"at_least": 61}:
        with pytest.raises(JobEndedError, match="job `read` has ended at version 60"):
            reader.get(**later)
    other = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 7), nn.Linear(8, 8, bias=False))
    before = {name: t.clone() for name, t in other.state_dict().items()}
    with pytest.raises(ConfigError, match=r"`0.weight` is \[8, 4\] in the version, \[7, 4\] in the model.*`5.bias` is not in the model"):
        last.load_into(other)
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items()), "nothing is changed"
    larger = nn.ModuleDict({str(i): layer for i, layer in enumerate(model())}).requires_grad_(False)
    larger["6"] = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ConfigError, match="`6.weight` is not in the version; `6.bias` is not in the version"):
        last.load_into(larger)
    with pytest.raises(ConfigError, match="the model has none of its tensors"):
        last.load_into(nn.Sequential(model()), strict=False)
    with pytest.raises(ConfigError, match="on `meta`"):
        last.load_into(model().to("meta"))
    with torch.inference_mode():
        frozen = model()
    last.load_into(frozen)
    last.load_into(torch.nn.DataParallel(model()))
    doubled = model().double()
    last.load_into(doubled)
    for name, t in last.state_dict().items():
        assert torch.equal(frozen.state_dict()[name], t) and torch.equal(doubled.state_dict()[name], t.double()), name
    for bad in {"at_least": "7"}, {"at_least": 1.5}, {"exactly": -1}, {"timeout": 0}:
        with pytest.raises(ConfigError):
            reader.get(**bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="only= has no name"):
        paraft.reader("read", fleet, only=[])
    with pytest.raises(ConfigError, match="no tensor of job `read` is named 9.*some of its names: 0.weight"):
        paraft.reader("read", fleet, only="9.*")
    with pytest.raises(VersionTimeoutError, match="job `nothing` cannot be read"):
        paraft.reader("nothing", fleet, timeout=1)
