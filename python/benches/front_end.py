"""What the front end costs beside the network, one process, one torch thread:

    python python/benches/front_end.py [--repeats 15] [--only overhead]

Prints a step's overhead (hooks, views, calls into the extension's place) over the same model with an optimizer whose ``step()`` does
nothing, MLP 784-256-128-10 at batch 64; what a step spends on finding weights that the script has written itself, with models of which a step
takes about 1 and 10 ms; what ``import paraft.torch`` takes over ``import torch``; and the peak memory of a worker with a model of 64 MiB over that of the same
loop in plain torch, with the servers in processes of their own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MLP = (784, 256, 128, 10)
MIDDLE = (784, 768, 512, 10)
LARGE = (2048, 2048, 2048, 2048, 2048)


def model(sizes: tuple[int, ...]) -> Any:
    """Linear layers with ReLU between."""
    from torch import nn

    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def step_of(m: Any, x: Any, y: Any, optimizer: Any) -> Callable[[], None]:
    """A step as scripts have it."""
    from torch.nn.functional import cross_entropy

    def step() -> None:
        cross_entropy(m(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


class Nowhere:
    """In the place of a session: takes what is pushed, and says that the step is done."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, gradients: list[tuple[int, int]], loss: float, samples: int) -> tuple[int, bool, bool]:
        """As the extension's."""
        self.steps += 1
        return self.steps, False, False

    def options(self, of_groups: list[tuple[float, dict[str, float]]]) -> None:
        """As the extension's."""

    def leave(self) -> None:
        """As the extension's."""


def overhead(repeats: int) -> None:
    """The loops in turn, in one process, by the thread's CPU clock; of each the step that a tenth of its steps undercut: work beside it
    stretches the others."""
    import torch

    import paraft.torch

    class Nothing(torch.optim.SGD):
        """Leaves the weights as they are; what torch does around a step is done."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Nothing."""

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(64, MLP[0]), torch.randint(0, 10, (64,))

    def plain(kind: type[torch.optim.SGD]) -> Callable[[], None]:
        m = model(MLP)
        return step_of(m, x, y, kind(m.parameters(), lr=0.1))

    alone, with_sgd = plain(Nothing), plain(torch.optim.SGD)
    with paraft.local(servers=1) as fleet:
        run = paraft.init(fleet)
        m = model(MLP)
        theirs, optimizer = run.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1))
        ours = step_of(theirs, x, y, optimizer)
        ours()
        session = run._session
        nowhere: Any = Nowhere()
        run._session = optimizer._paraft._session = nowhere  # type: ignore[attr-defined]
        took: dict[str, list[float]] = {"alone": [], "with torch's SGD": [], "ours": []}
        for _ in range(20 * repeats):
            for name, step in (("alone", alone), ("with torch's SGD", with_sgd), ("ours", ours)):
                step()
                for _ in range(10):
                    began = time.thread_time()
                    step()
                    took[name].append((time.thread_time() - began) * 1e6)
        run._session = optimizer._paraft._session = session  # type: ignore[attr-defined]
        run.finish()
    us = {name: statistics.quantiles(t, n=10)[0] for name, t in took.items()}
    more = us["ours"] - us["alone"]
    print(", ".join(f"{name} {t:,.0f} us" for name, t in us.items()), end="")
    print(f" a step; the front end {more:.1f} us, {more / us['alone']:.1%}")


def writes(repeats: int) -> None:
    """By the thread's CPU clock, which work beside it stretches less; the fastest of the repeats, of a step and of its digests."""
    import torch

    import paraft.torch

    torch.set_num_threads(1)
    for sizes in (MLP, MIDDLE):
        x, y = torch.randn(64, sizes[0]), torch.randint(0, sizes[-1], (64,))
        with paraft.local(servers=1) as fleet:
            run, m = paraft.init(fleet), model(sizes)
            m, optimizer = run.prepare(m, torch.optim.SGD(m.parameters(), lr=1e-3))
            step, flat = step_of(m, x, y, optimizer), optimizer._paraft.flat  # type: ignore[attr-defined]
            steps, digests = [], []
            for _ in range(repeats + 3):
                began = time.thread_time()
                step()
                stepped = time.thread_time()
                flat.written()
                flat.mark()
                digests.append(time.thread_time() - stepped)
                steps.append(stepped - began)
            run.close()
        of, cost = min(steps[3:]), min(digests[3:])
        print(f"{sum(p.numel() for p in m.parameters()):,} values: a step {of * 1e3:.1f} ms, of which digests {cost * 1e6:.0f} us, {cost / of:.2%}")


def imports(repeats: int) -> None:
    """In fresh interpreters, over what importing torch takes in the same one."""
    code = "import time, torch; a = time.perf_counter(); import paraft.torch; print(time.perf_counter() - a)"
    ms = [float(subprocess.check_output([sys.executable, "-c", code])) * 1e3 for _ in range(min(repeats, 5))]
    print(f"import paraft.torch: {statistics.median(ms):.1f} ms over torch's")


def train(way: str) -> None:
    """Some steps with a large model; prints the process's peak memory in MiB and how large the vector of weights is."""
    import torch

    torch.set_num_threads(1)
    m = model(LARGE)
    x, y = torch.randn(4, LARGE[0]), torch.randint(0, LARGE[-1], (4,))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
    run = None
    if way == "ours":
        import paraft.torch

        run = paraft.init()
        m, optimizer = run.prepare(m, optimizer)
    step = step_of(m, x, y, optimizer)
    for _ in range(20):
        step()
    if run is not None:
        run.finish()
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    print(peak, sum(p.numel() for p in m.parameters()) * 4 / 2**20)


def memory(repeats: int) -> None:
    """Processes of both ways in turn."""
    import paraft

    more, peaks = [], []
    for _ in range(min(repeats, 5)):
        plain = subprocess.check_output([sys.executable, __file__, "--train", "plain"], text=True).split()
        with paraft.local(servers=1) as fleet:
            env = {**os.environ, "PARAFT_SERVERS": ",".join(fleet.servers)}
            ours = subprocess.check_output([sys.executable, __file__, "--train", "ours"], text=True, env=env).split()
        more.append(float(ours[0]) - float(plain[0]))
        peaks.append(float(plain[0]))
    flat = float(plain[1])
    beyond = statistics.median(more)
    print(
        f"peak memory: plain torch {statistics.median(peaks):,.0f} MiB, ours {beyond:,.0f} MiB more: weights are {flat:.0f} MiB, "
        f"{beyond / flat:.2f} copies"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The front end's costs")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=("writes", "overhead"))
    parser.add_argument("--train", choices=("plain", "ours"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(args.train)
    if args.only:
        return {"writes": writes, "overhead": overhead}[args.only](args.repeats)
    writes(args.repeats)
    overhead(args.repeats)
    imports(args.repeats)
    memory(args.repeats)


if __name__ == "__main__":
    main()
