"""Ids that change completely twenty times: what a table keeps, and the servers' memory.

    paraft launch --workers 2 --name drift table_drift.py               # a full table evicts
    paraft launch --workers 2 --name drift table_drift.py 20            # and rows expire after 20 rounds

Each generation's 400,000 ids are named twice, 10,000 a step. The table is for 500,000 rows of 16 values with row-wise Adagrad;
each of its 16 partitions has room for 6 times the root of its share and 8 more. Prints, after each generation, the table's
counts and each server's resident MiB; then the least and the most of these from the third generation on, of the third's."""

import json
import os
import subprocess
import sys
import time
from typing import Any

import paraft.torch
import torch

GENERATIONS, IDS, PASSES, STEP, MAX_ROWS, PARTITIONS = 20, 400_000, 2, 10_000, 500_000, 16
SHARE = MAX_ROWS // PARTITIONS
ROOM = PARTITIONS * (SHARE + 6 * int(SHARE**0.5) + 8)


def said(servers: list[str]) -> dict[str, int]:
    """Counts of the table, from the leader of each shard."""
    counts = dict.fromkeys(("rows", "created", "evicted", "expired"), 0)
    for server in servers:
        command = [os.environ.get("PARAFT_PROGRAM", "paraft"), "status", "--json", "--fleet", server]
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        for line in out.stdout.splitlines():
            status: dict[str, Any] = json.loads(line)
            if status.get("address") == server:
                for table in (t for shard in status["shards"] if shard["leads"] for t in shard["tables"]):
                    counts = {what: n + table[what] for what, n in counts.items()}
    return counts


def resident() -> list[float]:
    """MiB of the servers, which are the launcher's other children."""
    found = subprocess.run(["pgrep", "-P", str(os.getppid()), "-f", "paraft server"], stdout=subprocess.PIPE, check=True)
    sizes = []
    for pid in found.stdout.split():
        with open(f"/proc/{int(pid)}/status") as f:
            sizes.append(int(f.read().split("VmRSS:")[1].split()[0]) / 1024)
    return sizes


torch.set_num_threads(1)
run = paraft.init()
room: dict[str, Any] = {"max_rows": MAX_ROWS, "partitions": PARTITIONS, "full": "evict"}
if len(sys.argv) > 1:
    room["expire"] = {"after": int(sys.argv[1])}
items = paraft.torch.Table("items", 16, **room, optimizer={"kind": "rowwise-adagrad", "lr": 0.01})
embedding = paraft.torch.Embedding(items)
model, optimizer = run.prepare(torch.nn.ModuleDict({"rows": embedding}), paraft.torch.TableOptimizer())
sizes = []
for generation in range(GENERATIONS):
    began = time.perf_counter()
    for first in range(run.rank * STEP, PASSES * IDS, run.workers * STEP):
        model["rows"](generation * IDS + first % IDS + torch.arange(STEP)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if run.rank == 0:
        seconds, counts = time.perf_counter() - began, said(run.servers)
        sizes.append(resident())
        print(generation + 1, f"{seconds:.1f} s", counts, " ".join(f"{size:.0f}" for size in sizes[-1]), "MiB", flush=True)
        if counts["rows"] > ROOM:
            sys.exit(f"there is room for {ROOM} rows")
if run.rank == 0:
    ratios = [f"{min(of) / of[0]:.2f} to {max(of) / of[0]:.2f}" for of in zip(*sizes[2:])]
    print("of the third generation's memory:", ", ".join(ratios))
run.finish()
