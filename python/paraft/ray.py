"""A fleet in a `Ray <https://www.ray.io>`_ cluster by one call::

    import paraft.ray

    def train(epochs):
        import paraft.torch

        run = paraft.init()
        model, optimizer = run.prepare(model_of(), optimizer_of)
        ...
        run.finish()

    result = paraft.ray.fit(train, 5, workers=4, resources_per_worker={"GPU": 1}, run_dir="/shared/runs/a")
    print(result.metrics["final_loss"])

Servers and workers are actors of one placement group. Ray restarts those whose process or node ends: a server returns to the fleet,
a worker continues its job (docs/engines.md).
"""

from __future__ import annotations

import collections
import importlib
import json
import logging
import os
import pickle
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

from ._fleet import program
from ._record import METRICS
from ._run import toml
from .errors import ConfigError, DataError, ParaftError, RecordError, UnavailableError

__all__ = ["Result", "fit"]

#: A child of Ray's logger: Ray's own settings show these lines too.
_LOG = logging.getLogger("ray.paraft")

#: The files of the run's folder that only this module has: proof that it is shared, and the function.
_TOKEN, _FUNCTION = "ray.token", "ray.function"
#: The addresses of a run's servers, and how it ended.
_SERVERS, _ENDED = "servers", "ended"
#: After this time without its resources a fleet logs what it waits for.
_LOG_WAIT_AFTER = 10.0
#: How long servers may take to end after the workers; those of a script that has trained nothing do not.
_END_SECONDS = 15.0
#: The interval at which the page waits for the fleet, and how long it tries to reach one.
_PAGE_SECONDS, _PAGE_TIMEOUT = 0.5, 60.0

#: Starts a program that ends with this actor. Ray 2.60 ends an actor's children with it, but not if its node's raylet was killed.
_TIED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Result:
    """What :func:`fit` returns."""

    #: The run's folder: record, logs, checkpoints.
    path: Path
    #: As ``paraft status --json`` prints them: ``final_loss``, ``final_accuracy``, ``samples``, ``model``, ... Empty if the script trains
    #: nothing.
    metrics: dict[str, Any]


def fit(
    train: Union[str, os.PathLike[str], Callable[..., Any]],
    *args: Any,
    workers: int = 2,
    servers: int = 3,
    settings: Optional[Mapping[str, Any]] = None,
    run_dir: Union[str, os.PathLike[str], None] = None,
    resources_per_worker: Optional[Mapping[str, float]] = None,
    resources_per_server: Optional[Mapping[str, float]] = None,
    restarts: int = 100,
    page: Optional[str] = "127.0.0.1:0",
) -> Result:
    """Trains in the Ray cluster, and returns when the job has ended.

    Every worker is a process that runs ``train``, which calls :func:`paraft.init`. Servers are spread over the nodes. The
    same call with the folder of a run that was interrupted continues it from its last checkpoint, which Ctrl-C saves; with
    ``{"cluster.durability": "quorum-disk"}`` from where its servers were.

    Args:
        train: a function, or the path of a script, which each node must have.
        args: the function's or the script's arguments.
        workers: the number of workers.
        servers: the number of servers.
        settings: keys of the job file, as ``{"train.mode": "asp"}`` (docs/configuration.md).
        run_dir: the run's folder, on a file system that all nodes of the cluster share. Default: ``runs/NAME-N`` in the current
            folder, with the first free N.
        resources_per_worker: as Ray counts them. Default: ``{"CPU": 1}``.
        resources_per_server: the same for a server.
        restarts: how often Ray starts each process again.
        page: where the live page is served, on this node, as ``host:port``; None: nowhere. Ray's dashboard shows its address as the
            ``Repr`` of the actor ``Page``.

    Raises:
        ConfigError: Ray is missing, an argument is wrong, or a node has not what it needs.
        UnavailableError: a process ended more often than ``restarts`` allows.
        ParaftError: a worker failed; the message has its last output.
    """
    ray = _ray()
    if workers < 1 or servers < 1:
        raise ConfigError(f"workers={workers}, servers={servers}: there is at least one of each")
    if not ray.is_initialized():
        ray.init()
    if ray.util.client.ray.is_connected():
        raise ConfigError("this process is a Ray Client (ray://), outside of the cluster: run it in the cluster, with `ray job submit`")
    name = (settings or {}).get("name") or _name(train)
    run = _folder(run_dir, name)
    if (run / _ENDED).exists():
        return _result(run)
    token = secrets.token_hex(8)
    command = ["--workers", str(workers), "--servers", str(servers), "--python", sys.executable]
    command += [word for key, value in (settings or {}).items() for word in ("--set", f"{key}={toml(value)}")]
    command += [] if "name" in (settings or {}) else ["--name", name]
    try:
        (run / _SERVERS).unlink(missing_ok=True)
        (run / _TOKEN).write_text(token)
        if callable(train):
            (run / _FUNCTION).write_bytes(pickle.dumps(sys.path) + ray.cloudpickle.dumps((train, args)))
            command += ["-m", __name__, str(run / _FUNCTION)]
        else:
            command += [os.path.abspath(train), *map(str, args)]
    except OSError as e:
        raise RecordError(f"the run's folder: {e}; choose another with run_dir=") from None
    of_server, of_worker = dict(resources_per_server or {"CPU": 1}), dict(resources_per_worker or {"CPU": 1})
    fleet = _Cluster(ray, run, name, token, restarts)
    try:
        fleet.start(command, [of_server] * servers, [of_worker] * workers, page)
        fleet.wait()
    except (KeyboardInterrupt, SystemExit):
        # Ctrl-C; SIGTERM, which `ray job stop` sends.
        fleet.save()
        raise
    finally:
        fleet.end()
    return _result(run)


def _ray() -> Any:
    try:
        for module in ("ray.util.client", "ray.util.scheduling_strategies"):
            importlib.import_module(module)
        return importlib.import_module("ray")
    except ImportError as e:
        raise ConfigError(f"paraft.ray needs Ray: pip install 'ray[default]' ({e})") from None


def _name(train: Union[str, os.PathLike[str], Callable[..., Any]]) -> str:
    """A job's name, whose characters are limited."""
    called = getattr(train, "__name__", "function") if callable(train) else Path(train).stem
    return re.sub(r"[^A-Za-z0-9._-]", "-", called)[:40].lstrip(".-") or "script"


def _folder(given: Union[str, os.PathLike[str], None], name: str) -> Path:
    """The run's folder, created."""
    try:
        if given is not None:
            os.makedirs(given, exist_ok=True)
            return Path(given).resolve()
        os.makedirs("runs", exist_ok=True)
        n = 1
        while True:
            folder = Path("runs", f"{name}-{n}")
            try:
                folder.mkdir()
                return folder.resolve()
            except FileExistsError:
                n += 1
    except OSError as e:
        raise RecordError(f"the run's folder: {e}; choose another with run_dir=") from None


def _result(run: Path) -> Result:
    """What an ended run has left."""
    ended: Any = json.loads((run / _ENDED).read_text()) if (run / _ENDED).exists() else "done"
    if ended != "done":
        failed = ended["failed"]
        raise _error(failed["code"])(f"worker {failed['worker']} on {failed['node']} failed with code {failed['code']}: {failed['said']}")
    if not (run / METRICS).exists():
        return Result(run, {})
    asked = subprocess.run([program(), "status", "--json", "--fleet", str(run)], capture_output=True, text=True)
    if asked.returncode:
        raise RecordError(f"the job is done, but its record cannot be read: {asked.stderr.strip()}")
    return Result(run, json.loads(asked.stdout))


# ---- in the driver ----


class _Cluster:
    """The actors of one run."""

    def __init__(self, ray: Any, run: Path, name: str, token: str, restarts: int) -> None:
        self._ray, self._run, self._job, self._token, self._restarts = ray, run, name, token, restarts
        self._group: Any = None
        self._actors: list[Any] = []
        #: What runs, by its reference.
        self._servers: dict[Any, str] = {}
        self._workers: dict[Any, str] = {}
        self._page: Any = None
        self._addresses: list[str] = []

    def start(
        self, command: list[str], servers: list[dict[str, float]], workers: list[dict[str, float]], page: Optional[str]
    ) -> None:
        ray = self._ray
        # Servers first: Ray spreads bundles in their order, over other nodes as long as there are some.
        self._group = ray.util.placement_group(servers + workers, strategy="SPREAD", name=f"paraft {self._job}")
        if not self._group.wait(_LOG_WAIT_AFTER):
            _LOG.info("%s waits for resources: %d x %s, %d x %s", self._job, len(servers), servers[0], len(workers), workers[0])
            ray.get(self._group.ready())
        for at, bundle in enumerate(servers + workers):
            role, index = ("server", at) if at < len(servers) else ("worker", at - len(servers))
            own = ["--role", role, "--index", str(index), "--until-done", *command]
            actor = self._actor(Server if role == "server" else Worker, bundle, at).remote(
                str(self._run), self._token, f"{self._job} {role} {index}", own
            )
            self._actors.append(actor)
            (self._servers if role == "server" else self._workers)[actor.run.remote()] = f"{role} {index}"
        if page is not None:
            here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            served = ray.remote(Page).options(num_cpus=0, scheduling_strategy=here).remote(str(self._run), page)
            self._actors.append(served)
            self._page = served.address.remote()
        _LOG.info("%s: %d servers, %d workers; run %s", self._job, len(servers), len(workers), self._run)

    def _actor(self, kind: type, bundle: dict[str, float], at: int) -> Any:
        placed = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=at)
        need = dict(bundle)
        options = {"num_cpus": need.pop("CPU", 0), "num_gpus": need.pop("GPU", 0)}
        if "memory" in need:
            options["memory"] = need.pop("memory")
        # Whatever ends the actor, its method runs again in the next one.
        return self._ray.remote(kind).options(
            **options, resources=need, scheduling_strategy=placed, max_restarts=self._restarts, max_task_retries=-1
        )

    def wait(self) -> None:
        """Waits until the workers have ended, then the servers."""
        while self._workers:
            self._look(1.0)
        until = time.monotonic() + _END_SECONDS
        while self._servers and time.monotonic() < until:
            self._look(1.0)

    def _publish(self) -> None:
        """Writes the servers' addresses where `--fleet RUN` reads them: a server that Ray starts again has another one."""
        if not (self._run / "fleet.number").exists():
            return
        said = {one.name[len("server-") :]: one for one in self._run.glob("addresses/server-*")}
        addresses = [json.loads(said[n].read_text())["address"] for n in sorted(filter(str.isdigit, said), key=int)]
        if addresses != self._addresses:
            new = self._run / (_SERVERS + ".new")
            new.write_text(",".join(addresses))
            os.replace(new, self._run / _SERVERS)
            self._addresses = addresses

    def _look(self, seconds: float) -> None:
        self._publish()
        waits_for = [*self._servers, *self._workers, *([self._page] if self._page is not None else [])]
        done, _ = self._ray.wait(waits_for, timeout=seconds)
        for ref in done:
            if ref is self._page:
                self._page = None
                try:
                    _LOG.info("page    %s", self._ray.get(ref))
                except self._ray.exceptions.RayError as e:
                    _LOG.warning("there is no live page: %s", e)
                continue
            who = self._servers.pop(ref, None) or self._workers.pop(ref)
            try:
                code, said = self._ray.get(ref)
            except self._ray.exceptions.RayTaskError as e:
                raise e.cause if isinstance(e.cause, ParaftError) else ParaftError(f"{who}: {e}") from None
            except self._ray.exceptions.RayError as e:
                raise UnavailableError(f"{who} of {self._job}: {e}; the same call with run_dir={str(self._run)!r} continues") from None
            if code:
                raise _error(code)(f"{who} of {self._job} failed with code {code}: {said}")

    def save(self) -> None:
        """Has the job write a checkpoint, from which its workers continue: servers that all end at once lose their memory."""
        _LOG.info("%s is interrupted: it saves a checkpoint; a second Ctrl-C ends it at once", self._job)
        order = [program(), "checkpoint", "save", self._job, "--fleet", str(self._run)]
        asked = subprocess.run(order, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if asked.returncode:
            _LOG.warning("no checkpoint is saved: %s", asked.stderr.strip())
        else:
            _LOG.info("%s: the same call with run_dir=%r continues from there", asked.stdout.strip(), str(self._run))

    def end(self) -> None:
        """Ends what still runs, and gives the resources back."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)


def _error(code: int) -> type[ParaftError]:
    kinds = [DataError, UnavailableError, RecordError, ConfigError]
    return next((kind for kind in kinds if kind.exit_code == code), ParaftError)


# ---- in the actors ----


def _tied(command: list[str], **how: Any) -> subprocess.Popen[str]:
    """A child that ends with this process."""
    start = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]
    how |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(start, text=True, errors="replace", **how)


class _Process:
    """A server or a worker: an actor that has it as its child."""

    def __init__(self, run: str, token: str, name: str, command: list[str]) -> None:
        self._run, self._token, self._name, self._command = run, token, name, command

    def __repr__(self) -> str:
        return self._name

    def run(self) -> tuple[int, str]:
        """The child's code and last output. If it should be started again, this actor ends, and Ray starts the next one."""
        node = _ray().util.get_node_ip_address()
        try:
            shared = Path(self._run, _TOKEN).read_text() == self._token
        except OSError:
            shared = False
        if not shared:
            why = f"node {node} does not have the run's folder {self._run}"
            raise ConfigError(f"{why}: choose one with run_dir= on a file system that all nodes share")
        command = [program(), "launch", "--run-dir", self._run, *self._command]
        child = _tied(command, env={**os.environ, "PARAFT_RAY_NODE": node})
        last: collections.deque[str] = collections.deque(maxlen=20)
        shows = threading.Thread(target=_show, args=(child.stdout, last), daemon=True)
        shows.start()
        code = child.wait()
        shows.join(2.0)
        # As `paraft_worker::exit::may_restart`.
        if code < 0 or code >= 128 or code in (UnavailableError.exit_code, RecordError.exit_code):
            os._exit(1)
        return code, "".join(last).strip()


class Server(_Process):
    """A server of a run."""


class Worker(_Process):
    """A worker of a run."""


def _show(lines: Any, last: collections.deque[str]) -> None:
    for line in lines:
        last.append(line)
        print(line, end="", flush=True)


class Page:
    """The live page of a run. Ray's dashboard shows its address as this actor's ``Repr``."""

    def __init__(self, run: str, at: str) -> None:
        self._address = ""
        while not Path(run, _SERVERS).exists():
            time.sleep(_PAGE_SECONDS)
        until = time.monotonic() + _PAGE_TIMEOUT
        while True:
            self._child = _tied([program(), "dashboard", "--fleet", run, "--at", at])
            lines = iter(self._child.stdout or [])
            first = next(lines, "")
            if first.startswith("page "):
                break
            # Servers of a continued run may be somewhere else than before.
            if time.monotonic() > until:
                raise UnavailableError(first + "".join(lines))
            time.sleep(_PAGE_SECONDS)
        print(first, end="", flush=True)
        self._address = first.split()[1]
        threading.Thread(target=_show, args=(lines, collections.deque(maxlen=1)), daemon=True).start()

    def __repr__(self) -> str:
        return self._address

    def address(self) -> str:
        """The page's address, with the token that it asks for."""
        return self._address


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as _file:
        _paths = pickle.load(_file)
        sys.path += [path for path in _paths if path not in sys.path]
        _train, _args = pickle.load(_file)
    _train(*_args)
