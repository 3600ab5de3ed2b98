"""What was trained goes out of a job and into one, in torch's own formats; plain torch is the oracle."""

from __future__ import annotations

import copy
import io
import json
import logging
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from torch import nn  # noqa: E402

#: Steps before and after.
K = 12
#: Each optimizer that the servers have, with how far its weights may be apart after 2 K steps, of the largest one. What divides by a
#: root of its gradients' squares makes much of their last bits.
OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], float]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-3), 1e-6),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1), 1e-6),
    "nesterov": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True), 1e-6),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.01), 1e-5),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4), 1e-5),
    "rmsprop, all of it": (lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3, momentum=0.5, centered=True), 1e-4),
    "adadelta": (lambda p: torch.optim.Adadelta(p, lr=1.0), 1e-5),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, betas=(0.8, 0.99)), 1e-5),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4), 1e-5),
    "adamax": (lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-4), 1e-5),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-4), 1e-5),
    "radam": (lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-4), 1e-5),
}


def script(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with a frozen layer in the middle and a tied one, and its optimizer, whose groups are in another order."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    m[4].bias = m[0].bias
    m[2].requires_grad_(False)
    biases = [p for p in reversed(list(m.parameters())) if p.ndim == 1]
    weights = [p for p in m.parameters() if p.ndim == 2]
    return m, OPTIMIZERS[name][0]([{"params": biases, "lr": 0.02}, {"params": weights}])


#: Places in the optimizer: Adagrad has a state of everything.
FROZEN = (1, 4)


def train(m: nn.Module, o: torch.optim.Optimizer, begin: int, end: int) -> None:
    for i, batch in enumerate(models.batches("mlp", 0, end)):
        if i >= begin:
            models.loss(m, batch).backward()
            o.step()
            o.zero_grad()


def apart(a: nn.Module, b: nn.Module) -> float:
    """The largest difference, of the largest weight."""
    a_state, b_state = a.state_dict(), b.state_dict()
    assert a_state.keys() == b_state.keys()
    return max(float((a_state[k] - b_state[k]).abs().max()) for k in a_state) / max(float(v.abs().max()) for v in b_state.values())


def same_state(ours: dict[str, Any], theirs: dict[str, Any], within: float) -> None:
    """The state of an optimizer, except of untrained parameters."""
    theirs = {**theirs, "state": {i: s for i, s in theirs["state"].items() if i not in FROZEN or i in ours["state"]}}
    assert ours["state"].keys() == theirs["state"].keys()
    for i, entry in theirs["state"].items():
        assert ours["state"][i].keys() == entry.keys()
        for key, value in entry.items():
            got = ours["state"][i][key]
            assert got.shape == value.shape and got.dtype == value.dtype, key
            small = 0.0 if key == "mu_product" else within  # it soon becomes almost zero
            assert torch.allclose(got, value, atol=small, rtol=1e-3), (i, key, float((got - value).abs().max()))
    assert ours["param_groups"] == theirs["param_groups"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_torch_goes_on_from_a_checkpoint(name: str, fleet: Any, tmp_path: Path) -> None:
    within = OPTIMIZERS[name][1]
    run = paraft.init(fleet, settings={"checkpoint.dir": str(tmp_path), "cluster.bucket_bytes": 1024})
    m, o = script(name)
    run.prepare(m, o, apply="servers")
    train(m, o, 0, K)
    folder = run.save()
    assert folder == tmp_path / f"step-{K:010}"
    plain, po = script(name)
    train(plain, po, 0, K)

    saved = paraft.torch.load_checkpoint(tmp_path)
    assert saved["step"] == K
    same_state(saved["optimizer"], po.state_dict(), 1e-5)
    other, oo = script(name)
    missing = other.load_state_dict(saved["model"], strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["2.weight", "2.bias"], [])
    assert apart(other, m) == 0
    oo.load_state_dict(saved["optimizer"])
    for one, its in ((other, oo), (plain, po), (m, o)):
        train(one, its, K, 2 * K)
    assert apart(other, plain) <= within
    assert apart(m, plain) <= within, "the run goes on"
    run.finish()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_servers_go_on_with_the_state_of_an_optimizer(name: str, fleet: Any) -> None:
    within = OPTIMIZERS[name][1]
    plain, po = script(name)
    train(plain, po, 0, K)
    file = io.BytesIO()
    torch.save({"model": plain.state_dict(), "optimizer": po.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)

    m, o = script(name)
    m.load_state_dict(saved["model"])
    o.load_state_dict(saved["optimizer"])
    run = paraft.init(fleet, settings={"cluster.bucket_bytes": 1024})
    run.prepare(m, o, apply="servers")
    same_state(o.state_dict(), saved["optimizer"], 0)
    for one, its in ((m, o), (plain, po)):
        train(one, its, K, 2 * K)
    assert apart(m, plain) <= within
    state = o.state_dict()
    if name not in ("momentum", "nesterov", "sgd"):
        assert float(state["state"][0]["step"]) == 2 * K
    same_state(state, po.state_dict(), 1e-5)
    run.finish()


def saves(out: str, mode: str) -> list[str]:
    """Worker 1 saves alone, then both do; the first saves while the other is late."""
    run = paraft.init(mode=mode, settings={"checkpoint.dir": out})
    m = models.model("conv", seed=run.rank)
    o = models.optimizer("adam", m)
    run.prepare(m, o)
    paths = []
    for i, batch in enumerate(models.batches("conv", run.rank, 8)):
        models.loss(m, batch).backward()
        o.step()
        o.zero_grad()
        if i == 3 and run.rank == 1 or i == 5:
            paths.append(str(run.save()))
            torch.save(m.state_dict(), f"{out}/{run.rank}-{i + 1}.pt")
    run.finish()
    return paths


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_any_worker_saves_and_all_may(mode: str, start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    paths = run_workers(start_fleet(3), saves, 2, str(tmp_path), mode).values
    four, six = (str(tmp_path / f"step-{step:010}") for step in (4, 6))
    assert paths == [[six], [four, six]]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")], "nothing half-written is left"
    for path, step in ((four, 4), (six, 6)):
        found = paraft.torch.load_checkpoint(path)
        assert found["step"] == step or mode == "asp"
        if mode == "bsp":
            theirs = torch.load(tmp_path / f"1-{step}.pt")
            assert found["model"].keys() == theirs.keys()
            weights = [k for k in theirs if "running" not in k and "tracked" not in k]
            assert all(torch.equal(found["model"][k], theirs[k]) for k in weights), "exactly the step's"
            assert {float(s["step"]) for s in found["optimizer"]["state"].values()} == {float(step)}


def saved(fleet: Any, folder: Path, steps: tuple[int, ...] = (K,), name: str = "adam", **options: Any) -> tuple[nn.Module, Any]:
    """A finished run that has saved at these steps."""
    run = paraft.init(fleet, settings={"checkpoint.dir": str(folder)})
    m, o = script(name)
    run.prepare(m, o, **options)
    for begin, end in zip((0, *steps), steps):
        train(m, o, begin, end)
        run.save()
    run.close()
    return m, o


def test_what_is_not_whole_is_refused(fleet: Any, tmp_path: Path, caplog: Any) -> None:
    saved(fleet, tmp_path / "all", (2, 4))
    first, last = (tmp_path / "all" / f"step-{step:010}" for step in (2, 4))
    for name in ("model.safetensors", "optimizer.safetensors", "checkpoint.json"):
        whole = (last / name).read_bytes()
        flipped = bytearray(whole)
        flipped[-10] ^= 1
        for damaged in (whole[: len(whole) // 2], whole[:4], b"", bytes(flipped), whole + b" "):
            (last / name).write_bytes(damaged)
            with pytest.raises(paraft.DataError, match=f"not whole: {re.escape(name)} is "):
                paraft.torch.load_checkpoint(last)
        with caplog.at_level(logging.WARNING, "paraft"):
            assert paraft.torch.load_checkpoint(tmp_path / "all")["step"] == 2, "the newest whole one"
        assert f"{name} is too long" in caplog.text or name == "checkpoint.json"
        (last / name).unlink()
        with pytest.raises(paraft.DataError, match=f"{re.escape(name)} is missing"):
            paraft.torch.load_checkpoint(last)
        (last / name).write_bytes(whole)
    assert paraft.torch.load_checkpoint(tmp_path / "all")["step"] == 4
    shutil.rmtree(first)
    shutil.rmtree(last)
    with pytest.raises(paraft.DataError, match="no checkpoint in it"):
        paraft.torch.load_checkpoint(tmp_path / "all")
    with pytest.raises(paraft.DataError, match="no such checkpoint"):
        paraft.torch.load_checkpoint(tmp_path / "none")


def test_run_resumes_and_other_model_is_refused_with_difference(start_fleet: Any, tmp_path: Path) -> None:
    saved(start_fleet(1), tmp_path)
    wrong = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 11))
    with pytest.raises(paraft.DataError, match=r"`0.bias` .* is not in|`2.weight` \[11, 16\] is not in it"):
        paraft.init(start_fleet(1), resume=str(tmp_path)).prepare(wrong, torch.optim.Adam(wrong.parameters()))
    m, o = script("sgd")
    with pytest.raises(paraft.DataError, match="it was trained with adam"):
        paraft.init(start_fleet(1), resume=str(tmp_path)).prepare(m, o)
    run = paraft.init(start_fleet(1), resume=str(tmp_path))
    m, o = script("adam")
    run.prepare(m, o)
    assert run.step == K
    plain, po = script("adam")
    train(plain, po, 0, 2 * K)
    train(m, o, K, 2 * K)
    assert apart(m, plain) <= OPTIMIZERS["adam"][1]
    same_state(o.state_dict(), po.state_dict(), 1e-5)
    run.finish()


def test_a_save_out_of_place_says_what_to_do(start_fleet: Any, tmp_path: Path, caplog: Any) -> None:
    run = paraft.init(start_fleet(1))
    m, o = script("adam")
    with pytest.raises(paraft.MisuseError, match="run.prepare"):
        run.save()
    run.prepare(m, o, overlap=True)
    with pytest.raises(paraft.ConfigError, match="checkpoint.dir"):
        run.save()
    train(m, o, 0, 2)
    models.loss(m, next(models.batches("mlp", 0, 1))).backward()
    with pytest.raises(paraft.MisuseError, match="between two steps"):
        o.state_dict()
    o.step()
    assert o.state_dict()["state"], "the run goes on, and needs no place for this"
    with caplog.at_level(logging.WARNING, "paraft"):
        o.load_state_dict(o.state_dict())
    assert "run.prepare" in caplog.text and not o.state
    run.finish()
    with pytest.raises(paraft.MisuseError, match="before run.finish"):
        run.save()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "paraft"):
        assert not o.state_dict()["state"]
    assert "before run.finish" in caplog.text

    run = paraft.init(start_fleet(1), run_dir=str(tmp_path))
    m, o = script("adam")
    run.prepare(m, o)
    assert run.save() == tmp_path / "checkpoints" / "step-0000000000"
    assert paraft.torch.load_checkpoint(tmp_path)["optimizer"]["state"] == {}
    run.finish()


def test_rates_are_those_of_the_script(fleet: Any, tmp_path: Path) -> None:
    run = paraft.init(fleet, settings={"checkpoint.dir": str(tmp_path)})
    m, o = script("adam")
    schedule = torch.optim.lr_scheduler.ExponentialLR(o, 0.5)
    run.prepare(m, o)
    train(m, o, 0, 1)
    schedule.step()
    run.save()
    groups = paraft.torch.load_checkpoint(tmp_path)["optimizer"]["param_groups"]
    assert groups == o.state_dict()["param_groups"]
    assert [g["lr"] for g in groups] == [0.01, 0.005]
    run.finish()


def test_checkpoint_of_other_workers_has_its_tensor_order(fleet: Any, tmp_path: Path) -> None:
    _, o = saved(fleet, tmp_path)
    path = tmp_path / f"step-{K:010}" / "checkpoint.json"
    told = paraft.torch.load_checkpoint(tmp_path)["optimizer"]
    manifest = json.loads(path.read_text())
    manifest["note"] = ""
    manifest["seal"] = "00000000"
    text = json.dumps(manifest, indent=2)
    path.write_text(text.replace('"seal": "00000000"', f'"seal": "{zlib.crc32(text.encode()):08x}"'))
    found = paraft.torch.load_checkpoint(tmp_path)
    names = [t["name"] for t in manifest["tensors"]]
    assert names == ["0.bias", "6.bias", "0.weight", "4.weight", "6.weight"]
    assert [g["params"] for g in found["optimizer"]["param_groups"]] == [[0, 1], [2, 3, 4]]
    for ours, theirs in zip(found["optimizer"]["param_groups"], told["param_groups"]):
        assert {**ours, "params": 0} == {**theirs, "params": 0}
    m = nn.ParameterDict({n.replace(".", "_"): nn.Parameter(found["model"][n]) for n in names})
    again = torch.optim.Adam([{"params": [m[n.replace(".", "_")] for n in names[a:b]]} for a, b in ((0, 2), (2, 5))])
    again.load_state_dict(found["optimizer"])
    for p in again.param_groups[1]["params"]:
        assert again.state[p]["exp_avg"].shape == p.shape


def test_an_optimizer_of_the_workers_is_not_in_a_checkpoint(fleet: Any, tmp_path: Path) -> None:
    m, o = saved(fleet, tmp_path, apply="worker")
    found = paraft.torch.load_checkpoint(tmp_path)
    assert found["optimizer"] is None and o.state_dict()["state"]
    assert torch.equal(found["model"]["6.weight"], m.state_dict()["6.weight"])


def test_torch_distributed_reads_an_exported_checkpoint(fleet: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
        m = models.model("conv")
        return m, torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4)

    def go(m: nn.Module, o: torch.optim.Optimizer, begin: int, end: int) -> None:
        for i, batch in enumerate(models.batches("conv", 0, end)):
            if i >= begin:
                models.loss(m, batch).backward()
                o.step()
                o.zero_grad()

    run = paraft.init(fleet, settings={"checkpoint.dir": str(tmp_path / "own")})
    m, o = plain()
    run.prepare(m, o)
    go(m, o, 0, K)
    paraft.torch.export_dcp(run.save(), tmp_path / "dcp")
    state = copy.deepcopy(o.state_dict())
    run.finish()

    other, oo = plain()
    model, optimizer = get_state_dict(other, oo)
    into = {"model": model, "optimizer": optimizer, "step": torch.tensor(0)}
    dcp.load(into, checkpoint_id=tmp_path / "dcp")
    set_state_dict(other, oo, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    assert int(into["step"]) == K
    ours = other.state_dict()
    assert all(torch.equal(ours[k], v) for k, v in m.state_dict().items()), "weights and statistics"
    same_state(oo.state_dict(), state, 0)


def test_a_script_that_resumes_itself_does_so_on_servers(start_fleet: Any, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    for end in (K, 2 * K):
        m, o = script("adamw")
        schedule = torch.optim.lr_scheduler.StepLR(o, 1, 0.9)
        begin = 0
        if file.exists():
            saved = torch.load(file)
            m.load_state_dict(saved["model"])
            o.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
            begin = saved["step"]
        run = paraft.init(start_fleet(1))
        run.prepare(m, o)
        for step in range(begin, end):
            train(m, o, step, step + 1)
            schedule.step()
        state = {"model": m.state_dict(), "optimizer": o.state_dict(), "schedule": schedule.state_dict(), "step": end}
        torch.save(state, file)
        run.finish()
    plain, po = script("adamw")
    schedule = torch.optim.lr_scheduler.StepLR(po, 1, 0.9)
    for step in range(2 * K):
        train(plain, po, step, step + 1)
        schedule.step()
    assert apart(m, plain) <= OPTIMIZERS["adamw"][1]


def test_a_server_that_dies_is_a_pause(start_fleet: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    run = paraft.init(fleet, settings={"checkpoint.dir": str(tmp_path)})
    m, o = script("adam")
    run.prepare(m, o)
    train(m, o, 0, K)
    before = run.save()
    fleet._processes[0].kill()
    state = o.state_dict()["state"]
    assert before.name == f"step-{K:010}"
    told = paraft.torch.load_checkpoint(before)["optimizer"]["state"]
    assert all(torch.equal(state[i][k], v) for i, entry in told.items() for k, v in entry.items())
    train(m, o, K, K + 1)
    assert run.save().name == f"step-{K + 1:010}"
    run.finish()


def grouped(out: str) -> list[str]:
    """A rank of one worker of two: the first saves, the other is refused."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    m, o = script("adam")
    ddp = nn.parallel.DistributedDataParallel(m)
    run = paraft.init(rank=0, workers=1, group=dist.group.WORLD, settings={"checkpoint.dir": out})
    run.prepare(ddp, o)
    train(ddp, o, 0, 2)
    said = []
    try:
        said.append(str(run.save()))
    except paraft.MisuseError as e:
        said.append(str(e))
    train(ddp, o, 2, 3)
    run.finish()
    dist.destroy_process_group()
    return said


def test_the_first_rank_of_a_group_saves(fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    first, other = run_workers(fleet, grouped, 2, str(tmp_path)).values
    assert first == [str(tmp_path / "step-0000000002")] and "if dist.get_rank() == 0" in other[0]
    m, o = script("adam")
    saved = paraft.torch.load_checkpoint(tmp_path)
    assert m.load_state_dict(saved["model"], strict=False).unexpected_keys == []
    o.load_state_dict(saved["optimizer"])
    train(m, o, 0, 1)
