"""Shared fixtures: fleets on this machine, and workers as processes with a time limit."""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent

# Set before torch is imported, here and in the workers: many workers share few cores.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# A shell ignores Ctrl-C in background processes, but tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests download nothing.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# An extension that was built into the source tree goes before an installed wheel, and with it the program of the same build;
# PARAFT_TEST_INSTALLED tests the wheel.
IN_TREE = any((PACKAGE / "paraft").glob("_paraft*.so")) and not os.environ.get("PARAFT_TEST_INSTALLED")
if IN_TREE:
    sys.path.insert(0, str(PACKAGE))
    _built = PACKAGE.parent / "target" / "debug" / "paraft"
    if _built.exists():
        os.environ.setdefault("PARAFT_PROGRAM", str(_built))

import paraft  # noqa: E402


class _Preloaded:
    """The process of ``preloaded.py``, which has imported torch and forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Optional[subprocess.Popen[str]] = None

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Its answer."""
        with self._lock:
            if self._process is None:
                command = [sys.executable, "-u", str(TESTS / "preloaded.py")]
                env = {**os.environ, "PYTHONPATH": import_path()}
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


_PRELOADED = _Preloaded()


class Forked:
    """A process that :class:`_Preloaded` has forked, with what :class:`Worker` needs of ``subprocess.Popen``."""

    def __init__(self, call: Sequence[str], **place: Any) -> None:
        self.pid: int = _PRELOADED.ask({"call": call, **place})
        self.returncode: Optional[int] = None

    def poll(self) -> Optional[int]:
        if self.returncode is None:
            self.returncode = _PRELOADED.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        # A process that has ended keeps its number until it is polled.
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class Worker:
    """A worker of a job, as a process. Its output goes to files, so that a full pipe never blocks it."""

    def __init__(self, command: Sequence[str], rank: int, env: Mapping[str, str], folder: Path, preloaded: bool = False) -> None:
        self.rank = rank
        self._out = folder / f"worker-{rank}.out"
        self._err = folder / f"worker-{rank}.err"
        self.process: Union[subprocess.Popen[bytes], Forked]
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            if preloaded:
                self.process = Forked(command[-3:], out=str(self._out), err=str(self._err), env=dict(env), cwd=str(folder))
            else:
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(env), cwd=folder)

    @property
    def out(self) -> str:
        """Its standard output so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """Its standard error so far."""
        return self._err.read_text(errors="replace")

    @property
    def value(self) -> Any:
        """What its function returned: its last line, as JSON."""
        lines = self.out.splitlines()
        if not lines:
            pytest.fail(f"worker {self.rank} said nothing\n{self.said()}")
        return json.loads(lines[-1])

    def said(self) -> str:
        """The ends of both outputs, for failure messages."""
        return f"--- worker {self.rank}, exit code {self.process.poll()}\n{self.out[-2000:]}\n{self.err[-4000:]}"

    def wait_for(self, text: str, timeout: float = 120.0) -> None:
        """Waits until its standard output has this text."""
        until = time.monotonic() + timeout
        while text not in self.out:
            if self.process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"worker {self.rank} did not say {text!r} in {timeout:g} s\n{self.said()}")
            time.sleep(0.02)

    def wait(self, timeout: float = 180.0) -> int:
        """Waits for its exit code; fails the test if it does not end in time."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"worker {self.rank} did not end in {timeout:g} s\n{self.said()}")

    def kill(self) -> None:
        """Ends it like a crash."""
        self.process.kill()
        self.process.wait()


class Workers(list[Worker]):
    """The workers of a job, by rank."""

    def wait(self, timeout: float = 180.0) -> Workers:
        """Waits until all have succeeded, all within ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while any(w.process.poll() is None for w in self):
            failed = any(w.process.poll() for w in self)
            if failed or time.monotonic() > until:
                why = "a worker failed" if failed else f"the workers did not end in {timeout:g} s"
                said = "\n".join(w.said() for w in self)
                self.kill()
                pytest.fail(f"{why}\n{said}")
            time.sleep(0.02)
        bad = [w for w in self if w.process.returncode]
        if bad:
            pytest.fail("\n".join(w.said() for w in bad))
        return self

    def kill(self) -> None:
        """Ends the workers that still run."""
        for worker in self:
            worker.kill()

    @property
    def values(self) -> list[Any]:
        """The return values of the workers' functions."""
        return [w.value for w in self]


def import_path() -> str:
    """Where a test's process finds the package and the test files."""
    found = [str(TESTS), *([str(PACKAGE)] if IN_TREE else []), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, found))


#: Started as ``python -c``: a function of a test file, with arguments as JSON, what it returns as the last line of the output.
_CALL = "import sys, json, importlib as i; m, f, a = sys.argv[1:]; v = getattr(i.import_module(m), f)(*json.loads(a)); print('\\n' + json.dumps(v))"


def recorded_loss(run_dir: Path) -> tuple[float, int]:
    """The mean loss of the steps in a run's record, whose lines are of one step or several, and how many those are: the last ones
    may be in no line."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    before, total = 0, 0.0
    for line in (line for line in lines if line["event"] == "train"):
        total += line["loss"] * (line["step"] - before)
        before = line["step"]
    return total / before, before


def _free_port() -> int:
    """A port that is free, and the next one too, below those that the system gives to connections and servers meanwhile."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as this, socket.socket() as following:
            try:
                this.bind(("127.0.0.1", port))
                following.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                continue


def start(
    fleet: Optional[paraft.Fleet],
    work: Union[Path, Callable[..., Any]],
    workers: int,
    *args: Any,
    folder: Path,
    env: Optional[Mapping[str, str]] = None,
    only: Optional[int] = None,
) -> Workers:
    """Starts workers as ``paraft launch`` does: see the fixture ``start_workers``."""
    preloaded = False
    if isinstance(work, Path):
        command = [sys.executable, str(work), *map(str, args)]
    else:
        # What works without torch is tested without it.
        preloaded = hasattr(sys.modules[work.__module__], "torch")
        module = Path(inspect.getfile(work)).stem
        command = [sys.executable, "-c", _CALL, module, work.__name__, json.dumps(args)]
    started = Workers()
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "TORCHELASTIC_RUN_ID": "test"}
    for rank in range(workers) if only is None else [only]:
        place = {"PARAFT_SERVERS": ",".join(fleet.servers)} if fleet is not None else {}
        place |= {"PARAFT_RANK": str(rank), "PARAFT_WORKERS": str(workers), "PARAFT_LOCAL_RANK": str(rank)}
        place |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
        whole = {**os.environ, "PYTHONPATH": import_path(), "PYTHONUNBUFFERED": "1", **group, **place, **(env or {})}
        started.append(Worker(command, rank, whole, folder, preloaded))
    return started


@pytest.fixture
def start_fleet() -> Iterator[Callable[..., paraft.Fleet]]:
    """``start_fleet(servers=3)``: as :func:`paraft.local`, ended with the test."""
    fleets: list[paraft.Fleet] = []

    def begin(servers: int = 1, **options: Any) -> paraft.Fleet:
        fleets.append(paraft.local(servers, **options))
        return fleets[-1]

    yield begin
    for fleet in fleets:
        fleet.close()


@pytest.fixture
def fleet(start_fleet: Callable[..., paraft.Fleet]) -> paraft.Fleet:
    """One server, for one job."""
    return start_fleet(1)


@pytest.fixture
def start_workers(tmp_path: Path) -> Iterator[Callable[..., Workers]]:
    """``start_workers(fleet, work, n, *args, env={})``: n workers of a job on this fleet, which may be killed, waited for and read;
    with ``only=r`` that of rank r alone, as one that comes back.

    ``work`` is a script's path, whose arguments are ``args``, or a function at the top of a test file: it is called in each process
    with ``args``, which must be JSON's as what it returns (``workers.values``). Those that still run at the test's end are killed.
    """
    started: list[Workers] = []

    def begin(fleet: Optional[paraft.Fleet], work: Union[Path, Callable[..., Any]], workers: int, *args: Any, **options: Any) -> Workers:
        folder = tmp_path / f"job-{len(started)}"
        folder.mkdir()
        started.append(start(fleet, work, workers, *args, folder=folder, **options))
        return started[-1]

    yield begin
    for workers in started:
        workers.kill()


@pytest.fixture
def run_workers(start_workers: Callable[..., Workers]) -> Callable[..., Workers]:
    """``run_workers(fleet, work, n, *args, timeout=180)``: ``start_workers``, and waits until all have ended well."""

    def begin(*args: Any, timeout: float = 180.0, **options: Any) -> Workers:
        return start_workers(*args, **options).wait(timeout)

    return begin
