"""Readers beside training: what they cost it, and how long a model does not answer while its weights are changed.

    python readers.py training [READERS]   # steps/s of two workers with none, and with READERS (32) that follow each second, in turns
    python readers.py pause                # a staged version loaded, beside torch.save, a rename, torch.load and load_state_dict
    python readers.py age                  # seconds from the end of a step to its weights in another process, p50 and p99

Each starts servers of its own with ``paraft.local()``. The model is an MLP of 2.1 million values (8.4 MB), for ``pause`` of 16.8 million
(67 MB)."""

import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

import paraft

WIDTH, STEPS = 1024, 60


def model(width: int = WIDTH) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))


def worker(rank: int, servers: str, steps: int, width: int) -> None:
    """Trains; prints its steps a second, and the time at the end of each step."""
    torch.set_num_threads(1)
    run = paraft.init(name="read", servers=servers.split(","), rank=rank, workers=2)
    mlp = model(width)
    mlp, optimizer = run.prepare(mlp, torch.optim.SGD(mlp.parameters(), lr=1e-3))
    x = torch.randn(16, width)

    def step() -> None:
        mlp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    began = time.monotonic()
    times = []
    for _ in range(steps):
        step()
        times.append(time.time())
    print(steps / (time.monotonic() - began), *times, flush=True)
    run.finish()


def start(call: str, *args: object, env: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, call, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})


def trained(readers: int, steps: int = STEPS) -> float:
    """Steps a second of worker 0."""
    with paraft.local() as fleet:
        env = {"PARAFT_CERTS": fleet.certs} if fleet.certs else {}
        servers = ",".join(fleet.servers)
        workers = [start("worker", rank, servers, steps, WIDTH, env=env) for rank in range(2)]
        following = [start("follow", servers, env=env)] if readers else []
        following += [start("follow", servers, env=env) for _ in range(readers // 8 - 1)]
        out = [process.communicate()[0].split() for process in workers]
        for process in following:
            process.kill()
            process.communicate()
        return float(out[0][0])


def follow(servers: str, readers: int = 8) -> None:
    """Readers that take the newest version each second."""
    import threading

    def one(delay: float) -> None:
        reader = paraft.reader("read", servers, timeout=60)
        time.sleep(delay)
        while True:
            began = time.monotonic()
            reader.get(timeout=60)
            time.sleep(max(0.0, 1 - (time.monotonic() - began)))

    for i in range(readers):
        threading.Thread(target=one, args=(i / readers,)).start()


def training(readers: int = 32) -> None:
    none, some = [], []
    for _ in range(3):
        none.append(trained(0))
        some.append(trained(readers))
    ratio = statistics.median(s / n for s, n in zip(some, none))
    print(f"steps/s with none {[round(n, 2) for n in none]}, with {readers} readers {[round(s, 2) for s in some]}: {ratio:.3f}")


def pause() -> None:
    width = 2896
    with paraft.local() as fleet, tempfile.TemporaryDirectory() as folder:
        env = {"PARAFT_CERTS": fleet.certs} if fleet.certs else {}
        workers = [start("worker", rank, ",".join(fleet.servers), 20, width, env=env) for rank in range(2)]
        for process in workers:
            process.communicate()
        reader = paraft.reader("read", fleet)
        mlp, path = model(width), os.path.join(folder, "weights.pt")
        ours, disk = [], []
        for _ in range(9):
            version = reader.get()  # received and checked while the model answers
            began = time.perf_counter()
            version.load_into(mlp)
            ours.append(time.perf_counter() - began)
            state = version.state_dict()
            torch.save(state, path + ".part")
            os.rename(path + ".part", path)
            began = time.perf_counter()
            mlp.load_state_dict(torch.load(path))
            disk.append(time.perf_counter() - began)
        ratio = statistics.median(o / d for o, d in zip(ours, disk))
        print(f"load_into {statistics.median(ours) * 1e3:.1f} ms, from the page cache {statistics.median(disk) * 1e3:.1f} ms: {ratio:.2f}")


def age() -> None:
    with paraft.local() as fleet:
        env = {"PARAFT_CERTS": fleet.certs} if fleet.certs else {}
        workers = [start("worker", rank, ",".join(fleet.servers), 200, WIDTH, env=env) for rank in range(2)]
        reader = paraft.reader("read", fleet, timeout=60)
        mlp, seen = model(), {}
        for version in reader.watch(timeout=5):
            version.load_into(mlp)
            seen[version.step] = time.time()
        out = [process.communicate()[0].split() for process in workers]
        ends = {step: float(at) for step, at in zip(range(6, 1000), out[0][1:])}
        ages = sorted(at - ends[step] for step, at in seen.items() if step in ends)
        p50, p99 = ages[len(ages) // 2], ages[len(ages) * 99 // 100]
        print(f"{len(ages)} of {len(ends)} versions, {p50 * 1e3:.0f} ms and {p99 * 1e3:.0f} ms behind worker 0's step")


if __name__ == "__main__":
    call, args = sys.argv[1], sys.argv[2:]
    if call == "worker":
        worker(int(args[0]), args[1], int(args[2]), int(args[3]))
    elif call == "follow":
        follow(args[0])
    elif call == "training":
        training(*map(int, args))
    else:
        {"pause": pause, "age": age}[call]()
