"""A table of 50 million rows of 16 values on one server: filled, trained, exported, its server killed and started again.

    python table_large.py [ROWS]

Row-wise Adagrad, one replica, durability quorum-disk; one worker, steps of 16,384 uniform ids. The data folder takes about 10 GB."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import torch

import paraft
import paraft.torch

ROWS = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000_000
FILL, STEP = 200_000, 16_384
PROGRAM = os.environ.get("PARAFT_PROGRAM", "paraft")
SETTINGS = {"cluster.servers": 1, "cluster.replicas": 1, "cluster.shards": 1, "cluster.durability": "quorum-disk"}


def served(address: str, data: str) -> "subprocess.Popen[bytes]":
    command = [PROGRAM, "server", "--servers", address, "--id", "0", "--shards", "1", "--replicas", "1"]
    return subprocess.Popen([*command, "--durability", "quorum-disk", "--data", data, "--insecure"], stdout=subprocess.DEVNULL)


def memory(server: "subprocess.Popen[bytes]") -> str:
    with open(f"/proc/{server.pid}/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return f"{int(lines['VmRSS'].split()[0]) >> 10} MiB (at most {int(lines['VmHWM'].split()[0]) >> 10})"


def main() -> None:
    torch.set_num_threads(1)
    os.environ["PARAFT_INSECURE"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "data")
        server = served(address, data)
        run = paraft.init(servers=[address], name="large", mode="asp", settings=SETTINGS)
        optimizer = {"kind": "rowwise-adagrad", "lr": 0.01}
        table = paraft.torch.Table("rows", 16, max_rows=ROWS + ROWS // 10, optimizer=optimizer, partitions=16)
        model = torch.nn.ModuleDict({"rows": paraft.torch.Embedding(table)})
        model, steps = run.prepare(model, paraft.torch.TableOptimizer())

        def step(ids: torch.Tensor) -> None:
            model["rows"](ids).sum().backward()
            steps.step()
            steps.zero_grad()

        def ids_per_second(n: int) -> float:
            began = time.perf_counter()
            for _ in range(n):
                step(torch.randint(0, ROWS, (STEP,)))
            return n * STEP / (time.perf_counter() - began)

        began = time.perf_counter()
        for first in range(0, ROWS, FILL):
            step(torch.arange(first, min(first + FILL, ROWS)))
        print(f"filled in {time.perf_counter() - began:.1f} s: {memory(server)}", flush=True)
        print(f"{ids_per_second(40):,.0f} ids/s", flush=True)
        export = [PROGRAM, "table", "export", "large", "rows", "--fleet", address, "--to", os.path.join(folder, "export")]
        began = time.perf_counter()
        exporting, beside = subprocess.Popen(export, stdout=subprocess.DEVNULL), []
        while exporting.poll() is None:
            beside.append(ids_per_second(5))
        took = time.perf_counter() - began
        print(f"exported in {took:.1f} s, meanwhile {sum(beside) / len(beside):,.0f} ids/s: {memory(server)}", flush=True)
        server.send_signal(signal.SIGKILL)
        server.wait()
        began = time.perf_counter()
        server = served(address, data)
        step(torch.arange(STEP))
        print(f"killed and started again: the next step is done after {time.perf_counter() - began:.1f} s", flush=True)
        print(f"{ids_per_second(40):,.0f} ids/s: {memory(server)}", flush=True)
        run.finish()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
