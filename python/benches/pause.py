"""How long a Python loop pauses when a server is killed, MLP 784-256-128-10 in one process on three servers:

    python python/benches/pause.py [--kills 40] [--durability quorum-memory] [--hang]

Each measurement: three fresh servers with three shards, each the leader of one; a hundred steps; ``kill -9`` of one
server between two of them;
steps until a second is over. The pause is the longest of these steps less the median of those before. Median, 99th percentile and
longest of all kills are printed. ``--hang``: the server is stopped instead, as one that hangs (``kill -STOP``). (`paraft bench failover` is the same for workers in Rust, of which nothing computes.)
"""

from __future__ import annotations

import argparse
import signal
import statistics
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paraft.torch


def pause(server: int, durability: str, hang: bool) -> float:
    """Seconds."""
    m = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))
    with paraft.local(servers=3, durability=durability, shards=3) as fleet:
        with paraft.init(fleet, mode="asp") as run:
            model, optimizer = run.prepare(m, torch.optim.SGD(m.parameters(), lr=0.01))

            def step() -> float:
                began = time.perf_counter()
                cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                return time.perf_counter() - began

            before = [step() for _ in range(100)]
            fleet._processes[server].send_signal(signal.SIGSTOP if hang else signal.SIGKILL)
            until = time.perf_counter() + (5.0 if hang else 1.0)
            after = []
            while time.perf_counter() < until:
                after.append(step())
            fleet._processes[server].kill()
    return max(after) - statistics.median(before)


def main() -> None:
    parser = argparse.ArgumentParser(description="A killed server under a Python loop")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--durability", default="quorum-memory")
    parser.add_argument("--hang", action="store_true", help="stop the server instead of killing it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pauses = sorted(pause(kill % 3, args.durability, args.hang) for kill in range(args.kills))
    p99 = pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))]
    ms = [f"{1e3 * t:.0f} ms" for t in (statistics.median(pauses), p99, pauses[-1])]
    print(f"{args.kills} {'stops' if args.hang else 'kills'}, {args.durability}: pause p50 {ms[0]}, p99 {ms[1]}, longest {ms[2]}")


if __name__ == "__main__":
    main()
