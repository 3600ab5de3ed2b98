"""Workers in a fleet: the mode is switched during training, some workers are Rust's, servers and workers are killed,
and every push counts once."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from paraft._fleet import program  # noqa: E402
from torch import nn  # noqa: E402


def ask(fleet: paraft.Fleet, *command: str) -> str:
    """Runs a command of the program on this fleet; returns its output."""
    done = subprocess.run([program(), *command, "--fleet", ",".join(fleet.servers)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def switched(out: str, flag: str) -> list[str]:
    """Trains until the flag exists; returns the modes that it has seen, in order."""
    run = paraft.init(name="switched")
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o)
    seen: list[str] = []
    while not Path(flag).exists():
        for batch in models.batches("mlp", run.rank, 10):
            models.loss(m, batch).backward()
            o.step()
            o.zero_grad()
            if seen[-1:] != [run.mode]:
                seen.append(run.mode)
                print(f"in {run.mode} after {len(seen)}", flush=True)
            time.sleep(0.005 * (1 + run.rank))
    run.finish()
    torch.save(m.state_dict(), f"{out}/{run.rank}.pt")
    return seen


def test_the_mode_is_switched_while_workers_train(start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    flag = tmp_path / "enough"
    workers = start_workers(fleet, switched, 2, str(tmp_path), str(flag))
    for i, mode in enumerate(["bsp", "asp", "bsp"], 1):
        if i > 1:
            ask(fleet, "mode", "switched", mode)
        for worker in workers:
            worker.wait_for(f"in {mode} after {i}", 60)
    flag.touch()
    assert workers.wait(90).values == [["bsp", "asp", "bsp"]] * 2
    a, b = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(a[k], b[k]) for k in a), "the final weights are the same"


MIXED = """
name = "mixed"
seed = 3
[model]
kind = "mlp"
hidden = [16]
[data]
kind = "csv"
path = "train.csv"
test_path = "test.csv"
[train]
workers = 2
mode = "bsp"
batch = 16
max_steps = 30
shuffle = false
[optimizer]
kind = "sgd"
lr = 0.1
[cluster]
servers = 1
replicas = 1
"""
MIXED_STEPS = 30


def table(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and their labels."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=g), torch.arange(rows) % 4


def shares(rank: int) -> list[models.Batch]:
    """The batches of a worker of two, as the job's sampler gives them without shuffling."""
    x, y = table(1000, 0)
    x, y = x[rank::2], y[rank::2]
    return [(x[i : i + 16], y[i : i + 16]) for i in range(0, 16 * MIXED_STEPS, 16)]


def small() -> nn.Module:
    """The tensors of Rust's ``mlp``, by name and shape."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def beside_rust(out: str, job: str) -> float:
    """Worker 1, whose worker 0 is Rust's: its first and its last weights; how far it went."""
    run = paraft.init(job=job)
    m = small()
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    run.prepare(m, o)
    first = {k: v.clone() for k, v in m.state_dict().items()}
    for batch in shares(run.rank):
        models.loss(m, batch).backward()
        o.step()
        o.zero_grad()
    run.finish()
    torch.save([first, m.state_dict()], f"{out}/both.pt")
    return max(float((first[k] - v).abs().max()) for k, v in m.state_dict().items())


def test_workers_of_python_and_of_rust_are_one_job(fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    for name, (x, y) in {"train": table(1000, 0), "test": table(40, 1)}.items():
        rows = [",".join(map(repr, [*row.tolist(), label])) for row, label in zip(x, y.tolist())]
        (tmp_path / f"{name}.csv").write_text("\n".join(rows) + "\n")
    job = tmp_path / "job.toml"
    job.write_text(MIXED)
    command = [program(), "worker", str(job), "--rank", "0", "--fleet", ",".join(fleet.servers)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as rust:
        try:
            env = {"PARAFT_RANK": "1", "PARAFT_WORKERS": "2"}
            (moved,) = start_workers(fleet, beside_rust, 1, str(tmp_path), str(job), env=env).wait(120).values
            assert rust.wait(60) == 0, rust.communicate()[1]
        finally:
            rust.kill()
    first, last = torch.load(tmp_path / "both.pt")
    # Both, in one process.
    plain = small()
    plain.load_state_dict(first)
    o = torch.optim.SGD(plain.parameters(), lr=0.1)
    for pair in zip(shares(0), shares(1)):
        for batch in pair:
            (models.loss(plain, batch) / 2).backward()
        o.step()
        o.zero_grad()
    apart = max(float((last[k] - v).abs().max()) for k, v in plain.state_dict().items())
    assert moved > 0.05 and apart < 1e-6, (moved, apart)


#: A power of two: sums of such moves are exact.
RATE = 2.0**-10
WIDE = 1024


def counted(out: str, mode: str, steps: int) -> int:
    """Pushes ones at each second weight, which are this worker's own, so that the weights count pushes; as many steps as that, or, for
    0, until a file ``enough`` is there. Says each step that is made."""
    run = paraft.init(mode=mode, settings={"cluster.bucket_bytes": 1024, "cluster.grace_ms": 2_000})
    m = nn.Linear(WIDE, 1, bias=False)
    nn.init.zeros_(m.weight)
    o = torch.optim.SGD(m.parameters(), lr=RATE)
    run.prepare(m, o)
    own = torch.zeros(1, WIDE)
    own[:, run.rank :: 2] = 1.0
    made = 0
    while made < steps if steps else not Path(out, "enough").exists():
        m.weight.grad = own.clone()
        o.step()
        made += 1
        print("made", made, flush=True)
        time.sleep(0.002)
    run.finish()
    if run.rank == 0:
        torch.save(m.weight.detach() / -RATE, f"{out}/weights.pt")
    return made


def made(worker: Any) -> int:
    """The number of steps in its output."""
    lines = [line for line in worker.out.splitlines() if line.startswith("made ") and line[5:].isdigit()]
    return int(lines[-1][5:]) if lines else 0


def restart(fleet: paraft.Fleet, i: int) -> None:
    """Restarts a killed server at its address with its folder."""
    command = list(fleet._processes[i].args)  # type: ignore[arg-type, call-overload]
    command[command.index("--listen") + 1] = fleet.servers[i]
    for pipe in (fleet._processes[i].stdin, fleet._processes[i].stdout):
        if pipe is not None:
            pipe.close()
    again = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    assert again.stdout is not None and again.stdin is not None and again.stdout.readline()
    again.stdin.write((",".join(fleet.servers) + "\n").encode())
    again.stdin.flush()
    fleet._processes[i] = again


def goes_on(worker: Any, steps: int = 20) -> None:
    """Waits until it has made this many more steps."""
    before, until = made(worker), time.monotonic() + 60
    while made(worker) < before + steps:
        assert worker.process.poll() is None and time.monotonic() < until, worker.said()
        time.sleep(0.02)


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_every_push_counts_once_while_each_server_is_killed(mode: str, start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    steps = 1500
    workers = start_workers(fleet, counted, 2, str(tmp_path), mode, steps)
    for i in range(3):
        goes_on(workers[0])
        fleet._processes[i].kill()
        fleet._processes[i].wait()
        goes_on(workers[0])
        restart(fleet, i)
        ask(fleet, "status", "--wait", "whole", "--timeout", "60")
    assert made(workers[0]) < steps, "they were killed while it trained"
    assert workers.wait(120).values == [steps, steps]
    weights = torch.load(tmp_path / "weights.pt")
    # In lock-step a round takes the mean of two.
    assert torch.equal(weights, torch.full_like(weights, steps / 2 if mode == "bsp" else steps))


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_every_push_counts_once_when_worker_and_server_die(mode: str, start_fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    fleet = start_fleet(3)
    workers = start_workers(fleet, counted, 2, str(tmp_path), mode, 0)
    for w in workers:
        goes_on(w)
    fleet._processes[0].kill()
    goes_on(workers[1])
    workers[1].kill()
    known = made(workers[1])
    goes_on(workers[0], 100)
    (tmp_path / "enough").touch()
    assert workers[0].wait(90) == 0, workers[0].said()
    weights = torch.load(tmp_path / "weights.pt").view(-1, 2)
    # Of the killed one a last push may be in, in some buckets.
    if mode == "bsp":
        its = weights[:, 1] * 2  # while there were two: halves
        alone = weights[:, 0] - weights[:, 1]
        assert torch.equal(alone + its, torch.full_like(its, workers[0].value)), "all of worker 0's"
    else:
        its = weights[:, 1]
        assert torch.equal(weights[:, 0], torch.full_like(its, workers[0].value)), "all of worker 0's"
    assert set(its.tolist()) <= {known, known + 1}, (its.unique(), known)
