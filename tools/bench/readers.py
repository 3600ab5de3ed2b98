"""Readers beside training: what they cost it, and how long a model does not answer while its weights are changed.

    python readers.py training [READERS [share]]   # steps/s of two workers with none, and with READERS (32) that follow each second,
                                                   # in turns; share: one of the host's readers reads for all
    python readers.py pause                # a staged version loaded, beside torch.save, a rename, torch.load and load_state_dict
    python readers.py age                  # seconds from the end of a step to its weights in another process, p50 and p99
    python readers.py bytes                # what each next version takes, of f32 whole, and which share of the values changed
    python readers.py host                 # a new version in all of 1, 8, 64 readers of this host that map it, and of 1, 8 that each
                                           # receive it; of as many raw copies

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
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})


def tell(process: "subprocess.Popen[str]", line: object) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def hear(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    process.stdout.readline()


def trained(readers: int, share: str = "", steps: int = STEPS) -> float:
    """Steps a second of worker 0."""
    with paraft.local() as fleet:
        env = {"PARAFT_CERTS": fleet.certs} if fleet.certs else {}
        servers = ",".join(fleet.servers)
        workers = [start("worker", rank, servers, steps, WIDTH, env=env) for rank in range(2)]
        following = [start("follow", servers, share, env=env)] if readers else []
        following += [start("follow", servers, share, env=env) for _ in range(readers // 8 - 1)]
        out = [process.communicate()[0].split() for process in workers]
        for process in following:
            process.kill()
            process.communicate()
        return float(out[0][0])


def follow(servers: str, share: str, readers: int = 8) -> None:
    """Readers that take the newest version each second."""
    import threading

    def one(delay: float) -> None:
        reader = paraft.reader("read", servers, timeout=60, share=share == "share")
        time.sleep(delay)
        while True:
            began = time.monotonic()
            reader.get(timeout=60)
            time.sleep(max(0.0, 1 - (time.monotonic() - began)))

    for i in range(readers):
        threading.Thread(target=one, args=(i / readers,)).start()


def training(readers: int = 32, share: str = "") -> None:
    none, some = [], []
    for _ in range(3):
        none.append(trained(0))
        some.append(trained(readers, share))
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


def stepped(servers: str, kind: str, lr: float, width: int) -> None:
    """A worker that does a step for each line of its input."""
    torch.set_num_threads(1)
    run = paraft.init(name="read", servers=servers.split(","), rank=0, workers=1)
    mlp = model(width)
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind](mlp.parameters(), lr=lr)
    mlp, optimizer = run.prepare(mlp, optimizer)
    torch.manual_seed(1)
    teacher = torch.nn.Linear(width, width)
    print("ready", flush=True)
    for _ in sys.stdin:
        x = torch.randn(64, width)
        with torch.no_grad():
            y = teacher(x)
        (mlp(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("done", flush=True)
    run.finish()


class Stepped:
    """One worker that steps when told, and its fleet."""

    def __init__(self, kind: str, lr: float, width: int) -> None:
        self.fleet = paraft.local()
        self.fleet.__enter__()
        self.env = {"PARAFT_CERTS": self.fleet.certs} if self.fleet.certs else {}
        self.servers = ",".join(self.fleet.servers)
        self.worker = start("stepped", self.servers, kind, lr, width, env=self.env)
        hear(self.worker)

    def step(self) -> None:
        tell(self.worker, "")
        hear(self.worker)

    def __enter__(self) -> "Stepped":
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.communicate()
        self.fleet.__exit__(None, None, None)


def differences() -> None:
    for kind, lr in (("adamw", 1e-6), ("sgd", 0.1)):
        with Stepped(kind, lr, WIDTH) as training:
            training.step()
            for dtype in ("bf16", "f32"):
                reader = paraft.reader("read", training.fleet, dtype=dtype)
                before = reader.get()
                rows = []
                for step in range(12 if dtype == "bf16" else 3):
                    training.step()
                    after = reader.get(at_least=before.step + 1)
                    old, new = before.state_dict(), after.state_dict()
                    values = sum(t.numel() for t in new.values())
                    changed = sum(int((new[name] != old[name]).sum()) for name in new)
                    rows.append((changed / values, after.received / (4 * values)))
                    before = after
                shown = ", ".join(f"{density * 100:.1f} %: {share:.4f}" for density, share in (rows[0], rows[len(rows) // 2], rows[-1]))
                print(f"{kind} {lr}, {dtype}: changed values: bytes of f32 whole: {shown}")


def wait_for_versions(servers: str, readers: int, share: str, versions: int) -> None:
    """Readers that each take every version, in threads; tells when the last of them has one."""
    import threading

    all_readers = [paraft.reader("read", servers, timeout=60, share=share == "share") for _ in range(readers)]
    for reader in all_readers:
        reader.get()
    print("ready", flush=True)
    for _ in range(versions):
        wanted = int(sys.stdin.readline())
        threads = [threading.Thread(target=reader.get, kwargs={"at_least": wanted}) for reader in all_readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("done", flush=True)


def host() -> None:
    """64 MiB and more, in processes of 8 readers."""
    width, versions = 2896, 5
    with Stepped("sgd", 0.1, width) as training:
        training.step()
        nbytes = sum(4 * p.numel() for p in model(width).parameters())
        source = torch.ones(nbytes // 4)
        for readers, share in ((1, "share"), (8, "share"), (64, "share"), (1, ""), (8, "")):
            copies = []
            for _ in range(5):
                target = torch.empty_like(source)
                target.fill_(0)
                began = time.perf_counter()
                for _ in range(readers):
                    target.copy_(source)
                copies.append(time.perf_counter() - began)
            args = (training.servers, min(readers, 8), share, versions)
            processes = [start("wait", *args, env=training.env) for _ in range(max(1, readers // 8))]
            for process in processes:
                hear(process)
            step = paraft.reader("read", training.fleet).get().step
            times = []
            for _ in range(versions):
                step += 1
                training.step()
                began = time.perf_counter()
                for process in processes:
                    tell(process, step)
                for process in processes:
                    hear(process)
                times.append(time.perf_counter() - began)
            for process in processes:
                process.communicate()
            ours, copy = statistics.median(times), statistics.median(copies)
            how = "map" if share else "receive"
            print(f"{readers} readers {how} {nbytes / 1e6:.0f} MB: {ours * 1e3:.0f} ms, {readers} copies {copy * 1e3:.0f} ms: {ours / copy:.2f}")


if __name__ == "__main__":
    call, args = sys.argv[1], sys.argv[2:]
    if call == "worker":
        worker(int(args[0]), args[1], int(args[2]), int(args[3]))
    elif call == "follow":
        follow(args[0], args[1])
    elif call == "stepped":
        stepped(args[0], args[1], float(args[2]), int(args[3]))
    elif call == "wait":
        wait_for_versions(args[0], int(args[1]), args[2], int(args[3]))
    elif call == "training":
        training(int(args[0]) if args else 32, "share" if "share" in args else "")
    else:
        {"pause": pause, "age": age, "bytes": differences, "host": host}[call]()
