"""A sparse table end to end: two workers over servers of Paraft, or over a server of PyTorch's RPC.

    paraft launch --workers 2 --mode asp --set cluster.servers=3 --set cluster.replicas=3 table_fleet.py ours
    python table_fleet.py rpc

Each worker takes steps of 16,384 ids (bags of 16, Zipf 1.05 over 1,000,000 rows of 16 values, Adagrad) and prints how many ids
it read and updated a second. The RPC way is that of PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC
Framework": the table lies on a server as a sparse EmbeddingBag, which pools there; dist_autograd carries gradients back, and a
DistributedOptimizer updates."""

import os
import sys
import time
import warnings
from typing import Any

import torch

warnings.filterwarnings("ignore")
ROWS, DIM, BATCH, BAG, SKEW, WARM, STEPS = 1_000_000, 16, 16_384, 16, 1.05, 10, 60


def batches(rank: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    u = torch.rand((20, BATCH), dtype=torch.float64, generator=g)
    ranks = ((ROWS ** (1 - SKEW) - 1) * u + 1) ** (1 / (1 - SKEW)) - 1
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(7))
    return list(order[ranks.long().clamp(0, ROWS - 1)])


OFFSETS = torch.arange(0, BATCH, BAG)


def measured(rank: int, step: Any) -> None:
    data = batches(rank)
    for i in range(WARM):
        step(data[i % 20])
    began = time.perf_counter()
    for i in range(STEPS):
        step(data[(WARM + i) % 20])
    print(f"worker {rank}: {STEPS * BATCH / (time.perf_counter() - began):.0f} ids/s", flush=True)


def ours() -> None:
    import paraft.torch

    torch.set_num_threads(1)
    run = paraft.init()
    table = paraft.torch.Table("items", DIM, max_rows=2 * ROWS, optimizer={"kind": "adagrad", "lr": 0.01})
    bag = paraft.torch.EmbeddingBag(table, mode="sum")
    model, optimizer = run.prepare(torch.nn.ModuleDict({"bag": bag}), paraft.torch.TableOptimizer())

    def step(ids: torch.Tensor) -> None:
        model["bag"](ids, OFFSETS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    measured(run.rank, step)
    run.finish()


def rpc(rank: int) -> None:
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    from torch.distributed.nn import RemoteModule
    from torch.distributed.optim import DistributedOptimizer

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, init_method=os.environ["AT"])
    rpc.init_rpc("server" if rank == 0 else f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank:
        bag = RemoteModule("server/cpu", torch.nn.EmbeddingBag, (ROWS, DIM), {"mode": "sum", "sparse": True})
        optimizer = DistributedOptimizer(torch.optim.Adagrad, bag.remote_parameters(), lr=0.01)

        def step(ids: torch.Tensor) -> None:
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [bag.forward(ids, OFFSETS).sum()])
                optimizer.step(context)

        measured(rank - 1, step)
    rpc.shutdown()


def all_of_rpc() -> None:
    import socket
    import subprocess

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        at = f"tcp://127.0.0.1:{s.getsockname()[1]}"
    processes = [subprocess.Popen([sys.executable, __file__, "rpc", str(r)], env={**os.environ, "AT": at}) for r in range(3)]
    sys.exit(max(p.wait() for p in processes))


if sys.argv[1] == "ours":
    ours()
elif len(sys.argv) > 2:
    rpc(int(sys.argv[2]))
else:
    all_of_rpc()
