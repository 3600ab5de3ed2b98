"""The state of jobs during training: from a fleet's live page (docs/dashboard.md), or from a run's folder
(docs/metrics.md).

A source runs in its own thread, and reports its state to its listener about twice a second. It ends with the fleet or
run that it watches, and says why.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional
from urllib.parse import urlsplit

from ._record import METRICS, Tail
from .errors import ConfigError, DataError

#: Timeout of a stream. A working server sends an event each second, even without news.
_SILENCE_SECONDS = 4.0
#: Without an answer for this long, the fleet counts as ended; a fleet of a single job sooner.
_GONE_SECONDS, _GONE_OWN_SECONDS = 60.0, 10.0
#: The interval of attempts to reach a page, and of reads of a folder.
_PAUSE_SECONDS = 0.5
#: A record without new lines for this long is reported as silent.
_STILL_SECONDS = 10.0
#: The maximum number of points of a curve; beyond it, every second point of the older half is dropped.
_POINTS = 1200
#: The maximum number of kept events.
_EVENTS = 5

Point = tuple[float, float]


@dataclass
class Worker:
    """A worker of a job."""

    worker: int
    step: int
    #: running, idle, finished, lost.
    state: str


@dataclass
class Job:
    """A job's known state."""

    name: str
    #: waiting, running, stopping, finished, stopped, lost, diverged.
    state: str
    mode: str
    expected: int
    workers: list[Worker] = field(default_factory=list)
    loss: Optional[float] = None
    held_out_loss: Optional[float] = None
    accuracy: Optional[float] = None
    epoch: Optional[int] = None
    samples_per_s: Optional[float] = None
    #: The curve of ``loss``, ``held_out_loss``, ``accuracy`` or ``samples_per_s``, over seconds; computed when it is
    #: drawn.
    curve: Callable[[str], list[Point]] = field(default=lambda _: [], repr=False)

    @property
    def step(self) -> int:
        """The fastest worker's step."""
        return max((w.step for w in self.workers), default=0)

    @property
    def present(self) -> int:
        """Workers that take part and have not finished."""
        return sum(w.state in ("running", "idle") for w in self.workers)


@dataclass
class Server:
    """A server of the fleet."""

    server: int
    address: str
    state: str
    #: Shards that it leads.
    leads: int


@dataclass
class Seen:
    """All that is known at one moment."""

    #: The source, or why there is no data, as text.
    where: str = ""
    #: No data arrives at present.
    lost: bool = False
    #: No more data will arrive.
    ended: bool = False
    jobs: list[Job] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    #: The leader of the control group.
    leader: Optional[int] = None
    events: list[str] = field(default_factory=list)

    def job(self, name: str = "") -> Optional[Job]:
        """The latest job of this name; without a name the latest that trains, otherwise the latest."""
        named = [j for j in self.jobs if not name or j.name == name]
        return next((j for j in reversed(named) if j.state == "running"), named[-1] if named else None)


Show = Callable[[Seen], None]


def source(target: str) -> Source:
    """The source for a page's address or a run's folder.

    Raises:
        ConfigError: the address has no token, or is invalid.
        DataError: there is no such folder.
    """
    return Page(target) if re.match(r"https?://", target) else Folder(target)


class Source:
    """See the module."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def run(self, show: Show) -> None:
        """Runs until there is no more data, or until it is stopped."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stops the source."""
        self.stopped.set()


# ---- a fleet's page ----


class _Refused(Exception):
    """The server answers, but refuses."""


class Page(Source):
    """The event stream of a fleet's page. When its server dies or hangs, the stream continues from another server
    with a page and the same token."""

    def __init__(self, address: str) -> None:
        super().__init__()
        url = urlsplit(address)
        token = re.search(r"token=(\w+)", url.fragment)
        if not url.hostname:
            raise ConfigError(f"{address!r} is no page's address: it is http://HOST:PORT/#token=…")
        if token is None:
            raise ConfigError(f"{address!r} has no token: copy the whole address that was printed, http://HOST:PORT/#token=…")
        self._token = token[1]
        self._secure = url.scheme == "https"
        self._given = (url.netloc, url.path.rstrip("/"))
        #: Host and port, and the path before ``/live``.
        self._at = self._given
        self._facts: dict[str, Any] = {}
        self._curves: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self._events: list[dict[str, Any]] = []
        self._connection: Optional[http.client.HTTPConnection] = None

    def stop(self) -> None:
        super().stop()
        connection = self._connection
        held: Optional[socket.socket] = connection.sock if connection is not None else None
        if held is not None:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)

    def run(self, show: Show) -> None:
        last_heard = time.monotonic()
        while not self.stopped.is_set():
            refused: list[str] = []
            for page in [self._at, *self._others()]:
                try:
                    if self._listens(page, show):
                        last_heard = time.monotonic()
                        break  # it has sent events and ended: ask the reachable servers again
                except _Refused as e:
                    refused.append(str(e))
                except (OSError, http.client.HTTPException, ValueError):
                    pass  # not reachable, or not our page
            if self.stopped.is_set():
                return
            host = self._at[0]
            if refused:
                why = refused[0]
            elif self._others():
                why = f"{host} does not answer; trying the others"
            else:
                why = f"{host} does not answer"
            # A single job's fleet ends with it; a standing fleet knows its jobs' record folders.
            has_run_folders = any(j.get("run") for j in self._facts.get("jobs", []))
            timeout = _GONE_SECONDS if has_run_folders or not self._facts else _GONE_OWN_SECONDS
            ended = time.monotonic() - last_heard > timeout or (bool(refused) and not self._facts)
            if ended and not refused:
                why = f"nobody answers at {host} any more: the fleet has ended, or watch it again when it is back"
            show(self._seen(why, lost=True, ended=ended))
            if ended:
                return
            self.stopped.wait(_PAUSE_SECONDS)

    def _others(self) -> list[tuple[str, str]]:
        """Pages of the other servers. Behind an HTTPS proxy there are none: the token would be sent to them
        unencrypted."""
        if self._secure:
            return []
        pages = [str(s.get("page") or "") for s in self._facts.get("servers", [])]
        known = [(page, "") for page in pages if page] + [self._given]
        return [p for p in dict.fromkeys(known) if p != self._at]

    def _listens(self, page: tuple[str, str], show: Show) -> bool:
        """Follows one server's stream to its end; returns whether it sent any event."""
        host, path = page
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(host, timeout=_SILENCE_SECONDS)
        self._connection = connection
        told = False
        try:
            connection.request("GET", f"{path}/live", headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            if answer.status == 403:
                raise _Refused(f"{host} does not let us in: take the whole address that was printed, with its token")
            if answer.status != 200:
                said = answer.read(500).decode(errors="replace").strip()
                raise _Refused(f"{host}: {said or answer.reason}")
            event, data = "", ""
            while not self.stopped.is_set():
                line = answer.readline()
                if not line:
                    break
                name, _, value = line.decode(errors="replace").rstrip("\r\n").partition(":")
                if name == "event":
                    event = value.strip()
                elif name == "data":
                    data += value.strip()
                elif not name and data:
                    self._hears(event, json.loads(data))
                    self._at, told = page, True
                    show(self._seen(f"live, from {host}"))
                    event, data = "", ""
        except (OSError, http.client.HTTPException):
            if not told:
                raise
        finally:
            connection.close()
        return told

    def _hears(self, event: str, said: Mapping[str, Any]) -> None:
        if event not in ("all", "news"):  # the last message of a run's server has its record
            return
        if said["facts"].get("at"):
            self._facts = said["facts"]
        if event == "all":
            self._curves, self._events = dict(said["curves"]), list(said["events"])
            return
        news = said["news"]
        for what in ("points", "evaluations"):
            for job, point in news[what].items():
                kept = self._curves.setdefault(job, {"points": [], "evaluations": []})[what]
                kept.append(point)
                _thin(kept)
        known = self._events[-1]["number"] if self._events else 0
        self._events = [*self._events, *(e for e in news["events"] if e["number"] > known)][-_EVENTS:]

    def _seen(self, where: str, lost: bool = False, ended: bool = False) -> Seen:
        servers = [Server(s["id"], s["address"], s["state"], s["leads"]) for s in self._facts.get("servers", [])]
        jobs = [self._job(j) for j in self._facts.get("jobs", [])]
        for job in jobs if ended else []:
            job.state = f"was {job.state}"
        return Seen(
            where=where,
            lost=lost,
            ended=ended,
            jobs=jobs,
            servers=servers,
            leader=self._facts.get("leader"),
            events=[str(e["what"]) for e in self._events[-_EVENTS:]],
        )

    def _job(self, facts: Mapping[str, Any]) -> Job:
        of = self._curves.get(str(facts["id"]), {"points": [], "evaluations": []})
        points, evaluations = list(of["points"]), list(of["evaluations"])
        latest = points[-1] if points else {}
        evaluated = facts.get("evaluated") or {}
        # 0 means that the model does not classify.
        classifies = bool(evaluated.get("accuracy")) or any(e["accuracy"] for e in evaluations)

        def curve(name: str) -> list[Point]:
            if name == "accuracy" and not classifies:
                return []
            key, of = {
                "loss": ("loss", points),
                "held_out_loss": ("loss", evaluations),
                "accuracy": ("accuracy", evaluations),
                "samples_per_s": ("samples", points),
            }[name]
            began = points[0]["at"] if points else of[0]["at"] if of else 0
            return [(max(0.0, (p["at"] - began) / 1e3), p[key]) for p in of if p.get(key) is not None]

        return Job(
            name=facts["name"] or f"job {facts['id']}",
            state="stopping" if facts["stopping"] else facts["state"],
            mode=facts["mode"],
            expected=facts["workers"],
            workers=[
                Worker(m["worker"], m["clock"], "finished" if m["finished"] else "idle" if m["idle"] else "running")
                for m in facts["members"]
            ],
            # There may be no new loss between two reads.
            loss=next((p["loss"] for p in reversed(points) if p.get("loss") is not None), None),
            held_out_loss=evaluated.get("loss"),
            accuracy=evaluated.get("accuracy") if classifies else None,
            epoch=evaluated.get("epoch"),
            samples_per_s=latest.get("samples"),
            curve=curve,
        )


def _thin(points: list[Any]) -> None:
    if len(points) > _POINTS:
        del points[1 : len(points) // 2 : 2]


# ---- a run's folder ----


class Folder(Source):
    """The record of a run, as it grows. It names the leaders only after the run has ended; before, only the servers
    know."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise DataError(f"{folder}: there is no such folder; give a run's, or the address that `paraft train` prints")
        self._tail = Tail(self._folder / METRICS)
        #: The run; None: its record has not started.
        self.job: Optional[Job] = None
        self._curves: dict[str, list[Point]] = {}
        #: The last evaluation: its step, if the job evaluates within epochs, else its epoch.
        self._evaluated: Optional[int] = None
        self._began = 0.0
        self._rates: dict[int, float] = {}
        self._workers: dict[int, Worker] = {}
        self._servers: dict[int, Server] = {}
        self._events: list[str] = []
        #: The record is complete.
        self.over = False

    def look(self) -> bool:
        """Reads on; returns whether there was more."""
        events = self._tail.read()
        for event in events:
            self._hears(event)
        if self.job is not None:
            self.job.workers = sorted(self._workers.values(), key=lambda w: w.worker)
        return bool(events)

    def run(self, show: Show) -> None:
        grew = time.monotonic()
        while True:
            more = self.look()
            now = time.monotonic()
            grew = now if more else grew
            still = now - grew
            where = f"from {self._folder}"
            if self.job is None:
                where = f"{self._folder} has no {METRICS} yet"
            elif self.over:
                where += ", which is whole"
            elif still > _STILL_SECONDS:
                where = f"nothing new in {self._folder} for {still:.0f} s"
            show(self._seen(where, lost=still > _STILL_SECONDS and not self.over))
            if self.over or self.stopped.wait(_PAUSE_SECONDS):
                return

    def _seen(self, where: str, lost: bool) -> Seen:
        servers = sorted(self._servers.values(), key=lambda s: s.server)
        jobs = [self.job] if self.job is not None else []
        return Seen(where=where, lost=lost, ended=self.over, jobs=jobs, servers=servers, events=self._events[-_EVENTS:])

    def _hears(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "run":
            self._curves = {"loss": [], "held_out_loss": [], "accuracy": [], "samples_per_s": []}
            self.job = Job(event["name"], "running", event["mode"], event["workers"], curve=self._curves.__getitem__)
            self._began, self.over, self._evaluated = event["wall"], False, None
            self._rates, self._workers, self._servers, self._events = {}, {}, {}, []
            return
        job = self.job
        if job is None:
            return
        seconds = max(0.0, event.get("wall", self._began) - self._began)
        if kind == "train":
            self._workers[event["worker"]] = Worker(event["worker"], event["step"], "running")
            if event["loss"] is not None:
                job.loss = event["loss"]
                _put(self._curves["loss"], seconds, event["loss"])
            if event["samples_per_s"] is not None:
                self._rates[event["worker"]] = event["samples_per_s"]
                job.samples_per_s = sum(self._rates.values())
                _put(self._curves["samples_per_s"], seconds, job.samples_per_s)
        elif kind == "eval" and (event.get("step", event["epoch"]) != self._evaluated or event["final"]):
            number = event.get("step", event["epoch"])
            new, self._evaluated = number != self._evaluated, number
            job.epoch, job.held_out_loss, job.accuracy = event["epoch"], event["loss"], event["accuracy"]
            for curve, value in (("held_out_loss", event["loss"]), ("accuracy", event["accuracy"])):
                if new and value is not None:
                    _put(self._curves[curve], seconds, value)
        elif kind == "worker":
            self._workers[event["worker"]] = Worker(event["worker"], event["steps"], "finished")
            self._rates.pop(event["worker"], None)
        elif kind == "mode":
            job.mode = event["mode"]
        elif kind == "leave":
            rank = event.get("rank")
            who = f"worker {event['worker']}" if rank is None else f"rank {rank} of worker {event['worker']}"
            self._events.append(f"{who} has left: {event['reason']}")
            if rank is None:
                self._rates.pop(event["worker"], None)
                if event["worker"] in self._workers:
                    self._workers[event["worker"]].state = "lost"
        elif kind == "server":
            # The record does not have the server's address.
            self._servers[event["server"]] = Server(event["server"], "", "", 0)
        elif kind == "shard":
            self._servers.setdefault(event["server"], Server(event["server"], "", "", 0)).leads += 1
        elif kind == "diverged":
            job.state, self.over = "diverged", True
            self._events.append(str(event["reason"]))
        elif kind == "summary":
            job.state, job.samples_per_s, self.over = "finished", event["samples_per_s"], True


def _put(curve: list[Point], x: float, y: float) -> None:
    # Workers write concurrently, and each reads the clock before it writes.
    curve.append((max(x, curve[-1][0]) if curve else x, y))
    _thin(curve)
