"""Samples a second of the same script by DistributedDataParallel (gloo) and by Paraft, two workers on this machine, one torch thread each:

    python python/benches/against_ddp.py [--repeats 5] [--models mlp,convnet,transformer]

The ways take turns, and what is printed is the median of each, with the ratio to DDP's of the same turn.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

MODELS = {"mlp": (64, 300), "convnet": (64, 40), "transformer": (8, 12)}
WAYS = ("ddp", "bsp", "asp")


def worker(way: str, kind: str) -> None:
    """Trains some steps; worker 0 prints samples a second of both."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(1)
    batch, steps = MODELS[kind]
    torch.manual_seed(0)
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
    y = torch.randint(0, 10, (batch,))
    o = torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9)
    run = None
    if way == "ddp":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        trained: nn.Module = nn.parallel.DistributedDataParallel(m)
    else:
        import paraft.torch

        run = paraft.init(mode=way)
        trained, _ = run.prepare(m, o)

    def step() -> None:
        out = trained(x)
        F.cross_entropy(out if out.ndim == 2 else out.mean(1), y).backward()
        o.step()
        o.zero_grad()

    for _ in range(max(3, steps // 10)):
        step()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - began
    if run is not None:
        run.finish()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"rate": 2 * batch * steps / seconds, "values": sum(p.numel() for p in m.parameters())}))


def measure(way: str, kind: str) -> tuple[float, int]:
    import paraft

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fleet = paraft.local(servers=1) if way != "ddp" else None
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    if fleet is not None:
        env["PARAFT_SERVERS"] = fleet.servers[0]
    command = [sys.executable, __file__, "--worker", way, kind]
    processes = [subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE) for r in range(2)]
    out = [p.communicate()[0] for p in processes]
    if fleet is not None:
        fleet.close()
    if any(p.returncode for p in processes):
        raise SystemExit(f"{way} {kind} failed")
    said = json.loads(out[0].splitlines()[-1])
    return said["rate"], said["values"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Paraft beside DistributedDataParallel")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--worker", nargs=2, metavar=("WAY", "MODEL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(*args.worker)
    for kind in args.models.split(","):
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.repeats):
            for way in WAYS:
                rate, values = measure(way, kind)
                rates[way].append(rate)
        row = [f"{kind} ({values:,} parameters)"]
        for way in WAYS:
            ratio = statistics.median(a / b for a, b in zip(rates[way], rates["ddp"]))
            row.append(f"{way} {statistics.median(rates[way]):,.0f} samples/s, {ratio:.2f} of DDP's")
        print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()
