"""Samples a second of the same loop by PyTorch's own ways and by Paraft, two workers on this machine, one torch thread each:

    python python/benches/against_torch.py [--repeats 5] [--models mlp,convnet,transformer] [--ways ddp,rpc,hogwild,bsp,asp]

Each is started as its users start it: DistributedDataParallel (gloo) by torchrun, a parameter server on ``torch.distributed.rpc``
(pull, gradients, push; one server) and Hogwild on shared memory by a script, Paraft by ``paraft launch --servers 1``. The ways take turns,
and what is printed is the median of each, with its ratio to DDP's of the same turn.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    import torch

MODELS = {"mlp": (64, 1000), "convnet": (64, 60), "transformer": (8, 12)}
WAYS = ("ddp", "rpc", "hogwild", "bsp", "asp")
WORKERS = 2


def task(kind: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """The model, and one batch for it."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    batch = MODELS[kind][0]
    if kind == "mlp":
        m = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
        x = torch.randn(batch, 784)
    elif kind == "convnet":
        m = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
        x = torch.randn(batch, 1, 28, 28)
    else:
        layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
        m = nn.Sequential(nn.Embedding(512, 384), nn.TransformerEncoder(layer, 5, enable_nested_tensor=False), nn.Linear(384, 10))
        x = torch.randint(0, 512, (batch, 64))
    return m, x, torch.randint(0, 10, (batch,))


def loop(kind: str, rank: int, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, update: Callable[[], None]) -> None:
    """Trains some steps, and writes down samples a second."""
    from torch.nn import functional as F

    def step() -> None:
        out = model(x)
        F.cross_entropy(out if out.ndim == 2 else out.mean(1), y).backward()  # type: ignore[no-untyped-call]
        update()

    batch, steps = MODELS[kind]
    for _ in range(max(3, steps // 10)):
        step()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    rate = batch * steps / (time.perf_counter() - began)
    Path(os.environ["BENCH_OUT"], f"rate-{rank}").write_text(repr(rate))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all ways."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def updates(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What a loop does with its gradients."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def worker(way: str, kind: str) -> None:
    """A process of this way."""
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", 0))
    if way == "hogwild":
        return hogwild(kind)
    if way == "rpc":
        return rpc(kind, rank)
    model, x, y = task(kind)
    optimizer = sgd(model)
    if way == "ddp":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        loop(kind, rank, torch.nn.parallel.DistributedDataParallel(model), x, y, updates(optimizer))
        dist.destroy_process_group()
    else:
        import paraft.torch

        with paraft.init() as run:
            model, optimizer = run.prepare(model, optimizer)
            loop(kind, rank, model, x, y, updates(optimizer))


def hogwild(kind: str) -> None:
    """As torch's notes on multiprocessing have it: every process its own optimizer, one model in shared memory."""
    import torch.multiprocessing as mp

    model = task(kind)[0].share_memory()
    mp.spawn(hogwild_worker, (kind, model), WORKERS)  # type: ignore[no-untyped-call]


def hogwild_worker(rank: int, kind: str, model: torch.nn.Module) -> None:
    """One of its processes."""
    import torch

    torch.set_num_threads(1)
    _, x, y = task(kind)
    loop(kind, rank, model, x, y, updates(sgd(model)))


class Server:
    """The weights of the parameter server on RPC; each push is applied at once."""

    here: Optional[Server] = None

    def __init__(self, kind: str) -> None:
        import torch

        self.model = task(kind)[0]
        self.weights = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()
        self.momentum = torch.zeros_like(self.weights)

    def push(self, gradient: torch.Tensor) -> torch.Tensor:
        """Applies a gradient; gives the weights back, so that a step is one exchange."""
        self.momentum.mul_(0.9).add_(gradient)
        return self.weights.add_(self.momentum, alpha=-0.01)


def pushed(gradient: Any) -> Any:
    """On the server."""
    assert Server.here is not None
    return Server.here.push(gradient)


def rpc(kind: str, rank: int) -> None:
    """Process 0 is the server, the others are workers."""
    import torch
    from torch.distributed import rpc as remote
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    if rank == 0:
        Server.here = Server(kind)
    remote.init_rpc(f"p{rank}", rank=rank, world_size=WORKERS + 1)
    if rank > 0:
        model, x, y = task(kind)
        params = list(model.parameters())

        def update() -> None:
            gradient = torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])
            vector_to_parameters(remote.rpc_sync("p0", pushed, (gradient,)), params)
            model.zero_grad()

        assert parameters_to_vector(params).numel() > 0
        loop(kind, rank - 1, model, x, y, update)
    remote.shutdown()


def measure(way: str, kind: str) -> float:
    """Samples a second of all workers of a run."""
    me = [__file__, "--worker", way, kind]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {**os.environ, "BENCH_OUT": folder, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        places: list[dict[str, str]] = [{}]
        if way == "ddp":
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS), *me]
        elif way in ("rpc", "hogwild"):
            command = [sys.executable, *me]
            if way == "rpc":
                places = [{"RANK": str(rank)} for rank in range(WORKERS + 1)]
        else:
            launch = ["--workers", str(WORKERS), "--servers", "1", "--mode", way, "--run-dir", f"{folder}/run"]
            command = [sys.executable, "-m", "paraft.launch", *launch, *me]
        log = open(f"{folder}/log", "w+")
        processes = [subprocess.Popen(command, env={**env, **place}, stdout=log, stderr=log) for place in places]
        if any([p.wait() for p in processes]):
            log.seek(0)
            raise SystemExit(f"{way} {kind} failed:\n{log.read()}")
        return sum(float(Path(folder, f"rate-{rank}").read_text()) for rank in range(WORKERS))


def main() -> None:
    parser = argparse.ArgumentParser(description="Paraft beside PyTorch's own ways")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--worker", nargs=2, metavar=("WAY", "MODEL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(*args.worker)
    ways = args.ways.split(",")
    for kind in args.models.split(","):
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.repeats):
            for way in ways:
                rates[way].append(measure(way, kind))
        values = sum(p.numel() for p in task(kind)[0].parameters())
        row = [f"{kind} ({values:,} parameters)"]
        for way in ways:
            ratio = statistics.median(a / b for a, b in zip(rates[way], rates[ways[0]]))
            row.append(f"{way} {statistics.median(rates[way]):,.0f} samples/s, {ratio:.2f}")
        print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()
