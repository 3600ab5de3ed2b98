"""A worker's part in a job: its state, and its end. The front ends define what it trains: :mod:`paraft.torch`,
:mod:`paraft.numpy`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import math
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional, TypeVar, Union

from . import _paraft
from ._fleet import Fleet
from .errors import ConfigError, DivergedError, MisuseError, ParaftError, RecordError

if TYPE_CHECKING:
    import torch
    import torch.distributed

    from ._reader import Reader
    from .torch._group import Group

_LOG = logging.getLogger("paraft")

_M = TypeVar("_M")
_O = TypeVar("_O")

#: A tensor of the model: its name, its shape, and whether it is trained.
Tensor = tuple[str, list[int], bool]


def _key(key: Any) -> str:
    """A key in TOML syntax: quoted if it has other characters than letters, digits, ``-`` and ``_``."""
    return str(key) if re.fullmatch("[A-Za-z0-9_-]+", str(key)) else json.dumps(str(key), ensure_ascii=False)


def toml(value: Any) -> str:
    """A value in TOML syntax."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return json.dumps(value)


def push_settings(encoding: str, clip_norm: Optional[float], clip_value: Optional[float]) -> list[str]:
    """Settings for the encoding of gradients, and for clipping by the servers."""
    settings = [f"train.encoding={toml(encoding)}"]
    settings += [f"clip.norm={clip_norm}"] if clip_norm is not None else []
    settings += [f"clip.value={clip_value}"] if clip_value is not None else []
    return settings


def _first(*names: str) -> Optional[str]:
    return next((os.environ[n] for n in names if os.environ.get(n)), None)


def _number(name: str, given: Optional[int], *variables: str) -> Optional[int]:
    text = _first(*variables)
    if given is not None or text is None:
        return given
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r} in the environment; it is a whole number") from None


def _in_step() -> bool:
    """Whether srun has started this process: Slurm numbers other processes, such as a batch script, from 0xfffffff0
    on."""
    step = os.environ.get("SLURM_STEP_ID") or ""
    return step.isdecimal() and int(step) < 0xFFFF_FFF0


def _float(value: Union[float, torch.Tensor]) -> float:
    return float(value.detach() if hasattr(value, "detach") else value)


def _factor(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"PARAFT_SLOW is {text!r} in the environment; it is a number") from None


class Run:
    """A worker's part in a job. :func:`paraft.init` creates it; :meth:`prepare` joins the job.

    Attributes:
        rank: this worker's rank, from 0.
        workers: the job's number of workers.
        servers: the addresses of its servers.
    """

    def __init__(
        self,
        *,
        servers: Sequence[str],
        rank: int,
        workers: int,
        job: Optional[str],
        settings: list[str],
        fleet: Optional[Fleet],
        run_dir: Optional[str],
        resume: Optional[str],
        group: Optional[Group] = None,
    ) -> None:
        self._owner = os.getpid()
        #: The extension's session, or a rank's proxy of it.
        self._session: Any = None
        self.servers = list(servers)
        self.rank = rank
        self.workers = workers
        self._job = job
        self._settings = settings
        self._fleet = fleet
        self._run_dir = run_dir
        self._resume = resume
        self._group = group
        #: The trainer. The optimizer's owner holds it, and it holds this run.
        self._front: Callable[[], Any] = lambda: None
        self._step = 0
        self._over = False
        self._finished = False
        self._closed = False
        #: The session's state at the last query.
        self._last: dict[str, Any] = {}
        #: Hooks on the model; they are removed at the end of the run.
        self._hooks: list[Any] = []
        self._quiet = 0
        self._moves = 0
        #: A step is pushed, and its wait is in progress or was interrupted.
        self._waits = False
        #: A thread is in that wait.
        self._waiting = False
        #: The call that waits for the servers, and its thread.
        self._call: Optional[tuple[str, int]] = None
        self._leased: dict[str, Any] = {}
        self._loss = math.nan
        #: The loss of this step that ``backward()`` was called on.
        self._heard = math.nan
        self._samples = 0
        #: Samples passed to the model since the last step.
        self._seen = 0
        _RUNS.add(self)

    # ---- the front ends ----

    def check_new(self) -> None:
        """Checks that a model can be given to this run.

        Raises:
            MisuseError: it has or had a model, or the servers are done.
        """
        self._not_inside("run.prepare()")
        if self._session is not None:
            raise MisuseError("this run has its model already: a run trains one model; make another with paraft.init()")
        if self._closed:
            raise MisuseError("this run is over: make another with paraft.init()")
        if self._fleet is not None and self._fleet._trained:
            raise MisuseError("these servers have trained their job to its end: make new ones with paraft.local()")

    def prepare(self, model: _M, optimizer: _O, **options: Any) -> tuple[_M, _O]:
        """Joins the job with a PyTorch model and its optimizer, or with several, and returns them, ready to train: see
        :func:`paraft.torch.prepare`, which has the options."""
        from . import torch as front

        prepare: Any = front.prepare
        prepared: tuple[_M, _O] = prepare(self, model, optimizer, **options)
        return prepared

    def _join(
        self,
        tensors: list[Tensor],
        address: int,
        values: int,
        owner: Any,
        *,
        groups: Sequence[tuple[int, float, float, Optional[str], bool]] = (),
        settings: Sequence[str] = (),
        data: str = "python",
        state: tuple[Sequence[int], Sequence[int]] = ((), ()),
        results: int = 0,
        note: str = "",
        tables: Sequence[str] = (),
    ) -> Any:
        self.check_new()
        if self._run_dir is not None:
            try:
                os.makedirs(self._run_dir, exist_ok=True)
            except OSError as e:
                raise RecordError(f"the run's folder: {e}") from None
        # A launcher has one folder for the record, logs and traces of all its workers.
        launched = os.environ.get("PARAFT_RUN_DIR") if os.environ.get("PARAFT_JOB") else None
        trace = os.environ.get("PARAFT_TRACE")
        slow, _, straggle = (os.environ.get("PARAFT_SLOW") or "1").partition(",")
        join = functools.partial(
            _paraft.Run,
            job=self._job,
            set=[*self._settings, *settings, *self._leased.get("settings", ())],
            rank=self.rank,
            servers=self.servers,
            tensors=tensors,
            groups=list(groups),
            samples=self._leased.get("samples", 0),
            data=data,
            # One worker's weights, as with DDP: weights of several workers would be mixed.
            brings=self.rank == 0,
            address=address,
            values=values,
            owner=owner,
            state=list(state[0]),
            updates=list(state[1]),
            results=results,
            note=note,
            tables=list(tables),
            run_dir=self._run_dir,
            resume=self._resume,
            metrics="127.0.0.1:0" if launched else None,
            log_file=os.path.join(launched, f"worker-{self.rank}.log") if launched else None,
            trace=(os.path.join(launched, "trace"), int(trace)) if launched and trace else None,
            slow=_factor(slow),
            straggle=straggle or None,
            certs=self._fleet.certs if self._fleet is not None else None,
        )
        try:
            with self._inside("run.prepare()"):
                session = join() if self._group is None else self._group.open(join)
            self._session = session
        except ParaftError as e:
            if e.rank_taken and any(self._is_beside(other) for other in _RUNS):
                raise MisuseError(
                    f"this process is worker {self.rank} of these servers already, with another model: finish() or close() that run first. "
                    "Two models at once (as of a GAN) are one run: run.prepare([first, second], [optimizer, optimizer])"
                ) from None
            raise
        self._query()
        if self._step:
            _LOG.log(
                logging.INFO if self._resume else logging.WARNING,
                "the job is at step %d: this worker continues with the servers' weights, not with its own; run.step says where", self._step,
            )
        return self._session

    def _not_inside(self, call: str) -> None:
        """Checks that a call may talk to the servers.

        Raises:
            MisuseError: this thread already waits for them: a signal handler makes the call.
        """
        waits = self._call
        if waits is not None and waits[1] == threading.get_ident():
            raise MisuseError(
                f"{call} is called while {waits[0]} waits, as by a signal's handler: have the handler set a flag, and make the call behind {waits[0]}"
            )

    @contextlib.contextmanager
    def _inside(self, call: str) -> Iterator[None]:
        """The block waits for the servers."""
        self._not_inside(call)
        before, self._call = self._call, (call, threading.get_ident())
        try:
            yield
        finally:
            self._call = before

    def _is_beside(self, other: Run) -> bool:
        """Whether the other run trains as this worker of these servers."""
        return other._session is not None and other.rank == self.rank and bool(set(other.servers) & set(self.servers))

    def _joined(self) -> Any:
        if self._session is None:
            raise MisuseError(
                "this run is over: paraft.init() makes another"
                if self._closed
                else "this run has no model yet: call run.prepare(model, optimizer) first"
            )
        return self._session

    def _trained_on(self) -> tuple[float, int]:
        """The loss and the samples of the current step, if known."""
        return self._heard if math.isnan(self._loss) else self._loss, self._samples or self._seen

    def _finish_step(self, gradients: list[tuple[int, int]]) -> None:
        """Waits for a step and pulls: gradients by tensor and address."""
        self._waited(lambda session: session.step(gradients, *self._trained_on()))

    def _resume_wait(self, *, aside: bool = False) -> None:
        """Finishes a step's wait that Ctrl-C has interrupted. ``aside``: ignore another thread's call."""
        if self._waits and not (aside and self._waiting):
            self._waited(lambda session: session.continue_wait())

    def _asked(self, ask: Callable[[Any], float]) -> float:
        """Asks the servers between the backward pass and the step."""
        if self._waiting:
            raise MisuseError("another thread is in optimizer.step() of this run: one thread trains")
        with self._inside("clip_grad_norm_()"):
            return ask(self._joined())

    def _waited(self, wait: Callable[[Any], tuple[int, bool, bool]]) -> None:
        self._not_inside("optimizer.step()")
        if self._waiting:
            raise MisuseError("another thread is in optimizer.step() of this run: one thread trains")
        session, before = self._joined(), self._call
        try:
            try:
                self._call = ("optimizer.step()", threading.get_ident())
                self._waits = self._waiting = True
                state = wait(session)
            finally:
                self._waiting, self._call = False, before
        except DivergedError:
            self._waits = False
            self._query()  # the step is done, except for values that are not finite
            self._pulled()
            raise
        except ParaftError:
            self._waits = False
            raise
        self._waits = False
        self._update(state)
        self._pulled()

    def _pulled(self) -> None:
        front = self._front()
        if front is not None:
            front.pulled()

    def _update(self, state: tuple[int, bool, bool]) -> None:
        self._step, moved, self._over = state
        self._moves += moved
        self._loss, self._heard, self._samples, self._seen = math.nan, math.nan, 0, 0

    # ---- what a loop asks and says ----

    @property
    def step(self) -> int:
        """This worker's last step. After a resume, or a return to the job, the step from which it continues."""
        return self._step

    @property
    def over(self) -> bool:
        """Whether nothing is left to train: the job was stopped early, or all chunks are trained."""
        return self._over

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0 (in a group its first rank), which writes files that are written once."""
        return self.rank == 0 and (self._group is None or self._group.leads)

    @property
    def mode(self) -> str:
        """The mode in force: ``bsp``, ``ssp:S`` or ``asp``. It may be switched while the job trains (``paraft mode``)."""
        return str(self._query()["mode"])

    def stats(self) -> dict[str, Any]:
        """``name``, ``step``, ``mode``, ``over``, ``bytes_pushed``, ``bytes_pulled``, ``wait_seconds``, ``rejoins``,
        ``dropped``, ``skipped``, for a progress bar or your own logger."""
        return self._query()

    def reader(self, *, dtype: str = "f32", only: Union[str, Sequence[str], None] = None, timeout: float = 30.0) -> Reader:
        """A reader of this run's weights, for another thread or process of the same host: see :func:`paraft.reader`.

        Raises:
            MisuseError: no model has joined the job yet.
        """
        from ._reader import reader

        fleet = self._fleet if self._fleet is not None else self.servers
        return reader(self._query()["name"], fleet, dtype=dtype, only=only, timeout=timeout)

    def _query(self) -> dict[str, Any]:
        if self._closed and self._last:
            return dict(self._last)
        if self._last and self._call is not None:  # a signal handler or another thread asks during a wait
            return {**self._last, "step": self._step, "over": self._over}
        self._last = self._joined().status()
        self._step, self._over = self._last["step"], self._last["over"]
        return dict(self._last)

    def log(self, loss: Union[float, torch.Tensor, None] = None, samples: int = 0, **values: Union[float, torch.Tensor]) -> None:
        """Records the mean loss of the current step; call it before ``optimizer.step()``. Without it a PyTorch script's
        loss is what ``backward()`` was called on, if that is on the CPU: several in a step add up, as their gradients do.
        (It reads the loss from its device, like ``loss.item()``.)

        ``samples``: the number of samples behind it. Default: the first dimension of the model's first argument.
        ``values``: further numbers of this step, under names of your own: ``run.log(loss, perplexity=8.1)``. Report and
        trackers have a curve of each; in a group of ranks, of the first rank's. A number that is NaN or infinite is left
        out.

        Raises:
            MisuseError: a name is that of a curve that Paraft records itself, or there are more than 64 names.
        """
        if loss is not None:
            self._loss, self._samples = _float(loss), samples
        for name, value in values.items():
            self._joined().log(name, _float(value))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block push nothing: their gradients are added to the next ones outside of it, as
        with DDP."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def report(self, epoch: int, loss_sum: float, correct: int = 0, count: int = 0) -> None:
        """Reports this worker's share of a held-out evaluation, as sums over ``count`` samples; the record has the
        mean over all workers. ``epoch`` counts from 1."""
        with self._inside("run.report()"):
            self._joined().report(epoch, loss_sum, correct, count)

    def save(self) -> Path:
        """Writes a checkpoint of this worker's step: the weights and the servers' optimizer state. Waits until it is
        complete on disk, and returns its folder: :func:`paraft.torch.load_checkpoint` reads it, and
        ``paraft.init(resume=...)`` resumes from it.

        Call it between two steps, and before :meth:`finish`. Any worker may (in a group its first rank); if several
        do at one step, one writes it for all that share the folder. Its folder is that of the job's checkpoints:
        ``checkpoint.dir`` of the settings, otherwise ``checkpoints`` in the run's folder.

        Raises:
            ConfigError: the job has no folder for checkpoints.
            MisuseError: gradients of the next step are pushed already, the run is over, or a signal handler calls it
                during another call's wait: let the handler set a flag.
            UnavailableError: the servers cannot be reached, or do not agree on a step.
            RecordError: the files cannot be written.
        """
        return Path(self._saved())

    def _saved(self, folder: Optional[str] = None) -> str:
        if self._finished:
            raise MisuseError("the run is finished, and with it the servers' part: call run.save() before run.finish()")
        self._joined()
        self._not_inside("run.save()")
        self._resume_wait()
        tell_rates = getattr(self._front(), "tell_rates", None)
        if tell_rates is not None:
            tell_rates()
        unsaved = getattr(self._front(), "unsaved", None)
        if unsaved is not None:
            unsaved()
        with self._inside("run.save()"):
            saved: str = self._joined().save(folder)
        return saved

    # ---- the end ----

    def finish(self) -> None:
        """The loop has ended: waits until the loops of all workers have, and pulls the final weights, equal on all.

        Raises:
            UnavailableError: the servers cannot be reached.
        """
        self._not_inside("run.finish()")
        if not self._finished:
            ends = getattr(self._front(), "ends", None)
            if ends is not None:
                ends()
            with self._inside("run.finish()"):
                self._joined().finish()
            self._query()
            self._finished = self._over = True
            self._last["over"] = True
            if self._fleet is not None:
                self._fleet._trained = True
            self._pulled()
        self.close()

    def close(self) -> None:
        """Leaves the job if it is not finished: the other workers continue. The run's fleet is ended separately by
        :meth:`Fleet.close`."""
        self._not_inside("run.close()")
        session, self._session = self._session, None
        self._closed |= session is not None
        self._unhook()
        if session is not None and os.getpid() == self._owner:
            session.leave()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _forgotten(self) -> None:
        """The run was neither finished nor closed. A failed script has reported its own error."""
        if self._session is not None and self._step and os.getpid() == self._owner and not hasattr(sys, "last_type"):
            _LOG.warning(
                "the run ends at step %d without run.finish(): the other workers continue without this one, and it has not got the final weights",
                self._step,
            )

    def __del__(self) -> None:
        self._forgotten()
        self._unhook()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], e: Optional[BaseException], at: Optional[TracebackType]
    ) -> None:
        if kind is None:
            self.finish()
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a paraft run cannot be pickled: it belongs to its process. Make one in each process with paraft.init()"
        )

    def __repr__(self) -> str:
        return f"<paraft.Run: worker {self.rank} of {self.workers}, step {self._step}>"


#: Left in order at the interpreter's end: their threads would outlive it.
_RUNS: weakref.WeakSet[Run] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for run in list(_RUNS):
        with contextlib.suppress(Exception):
            run._forgotten()
            run.close()


def _exit_code(kind: type[BaseException], e: BaseException, at: Optional[TracebackType]) -> None:
    _say(kind, e, at)
    if isinstance(e, ParaftError):
        _leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(e.exit_code)


_say = sys.excepthook


def init(
    fleet: Optional[Fleet] = None,
    *,
    servers: Union[str, Sequence[str], None] = None,
    rank: Optional[int] = None,
    workers: Optional[int] = None,
    mode: Optional[str] = None,
    name: Optional[str] = None,
    job: Optional[str] = None,
    run_dir: Optional[str] = None,
    resume: Optional[str] = None,
    settings: Optional[Mapping[str, Any]] = None,
    group: Optional[torch.distributed.ProcessGroup] = None,
) -> Run:
    """This process's part in a job. Under ``paraft launch`` no argument is needed.

    Args:
        fleet: servers of :func:`paraft.local`; this process is then the job's only worker, unless ``workers`` says more.
        servers: ``host:port`` of all servers, a list or with commas between. Default: ``PARAFT_SERVERS``. They are reached with the
            certificates of ``PARAFT_CERTS`` (docs/security.md); a launcher sets both.
        rank: this worker, from 0. Default: ``PARAFT_RANK``, ``RANK`` (torchrun), ``SLURM_PROCID``, else 0.
        workers: of the job. Default: ``PARAFT_WORKERS``, ``WORLD_SIZE``, ``SLURM_NTASKS``, else 1.
        mode: ``bsp`` (lock-step), ``ssp:S`` (bounded staleness), ``asp`` (asynchronous) or ``auto``.
        name: of the job; workers with another are refused.
        job: a job file (docs/configuration.md). Default: ``PARAFT_JOB``.
        run_dir: where the record and checkpoints go. Default: ``PARAFT_RUN_DIR``, else nothing is written.
        resume: a checkpoint to begin with, or a folder of them. Default: ``PARAFT_RESUME``.
        settings: any key of a job file, ``{"cluster.grace_ms": 5_000}``.
        group: a process group of torch whose ranks, on one host, are one worker: DistributedDataParallel or FSDP2 averages inside, and its
            first rank speaks with the servers. ``rank`` and ``workers`` then count groups; default: ``PARAFT_RANK`` and
            ``PARAFT_WORKERS``, else all ranks are in groups of this size.

    Raises:
        ConfigError: no servers are named, or a setting cannot be.
    """
    own = os.environ.get("PARAFT_JOB") is not None
    together = None
    if group is not None:
        from .torch._group import Group

        together = Group(group)
        if not (rank is not None and workers is not None) and not (_first("PARAFT_RANK") and _first("PARAFT_WORKERS")):
            rank, workers = together.place()
    lifeline = os.environ.get("PARAFT_LIFELINE_FD")
    if lifeline and fleet is None:
        _paraft.end_with(int(lifeline))
        del os.environ["PARAFT_LIFELINE_FD"]  # once, and not inherited by children
    job = job or os.environ.get("PARAFT_JOB")
    lines: list[str] = []
    if fleet is not None:
        listed: Sequence[str] = fleet.servers
        lines += fleet.settings()
        rank, workers = rank or 0, workers or 1
    else:
        servers = servers or os.environ.get("PARAFT_SERVERS") or ""
        listed = [s.strip() for s in servers.split(",") if s.strip()] if isinstance(servers, str) else list(servers)
        if not listed:
            raise ConfigError(
                "no servers are named: start the script with `paraft launch`, or make a fleet on this machine: "
                "paraft.init(paraft.local())"
            )
        for address in listed:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ConfigError(f"{address!r} is no server's address: it is host:port")
            if ":" in host and not host.startswith("["):
                raise ConfigError(f"{address!r} is no server's address: IPv6 is written in brackets, [{host}]:{port}")
        if job is None:
            lines += [f"cluster.servers={len(listed)}", f"cluster.replicas={min(3, len(listed) - 1 + len(listed) % 2) or 1}"]
        rank = _number("the rank", rank, "PARAFT_RANK", "RANK", "SLURM_PROCID") or 0
        told = workers is not None or _first("PARAFT_WORKERS", "WORLD_SIZE") is not None
        workers = _number("the number of workers", workers, "PARAFT_WORKERS", "WORLD_SIZE", "SLURM_NTASKS") or 1
        if not told and workers > 1 and not _in_step():
            _LOG.warning(
                "the job waits for %d workers (SLURM_NTASKS), and srun has not started this process, which is worker %d: start the script with "
                "`srun python ...`, or say workers=1",
                workers,
                rank,
            )
    if job is None or not own:
        lines.append(f"train.workers={workers}")
    if job is None:
        lines.append(f"name={toml(name or 'paraft')}")
    elif name:
        lines.append(f"name={toml(name)}")
    if mode:
        lines.append(f"train.mode={toml(mode)}")
    for key, value in (settings or {}).items():
        lines.append(f"{key}={toml(value)}")
    if sys.excepthook is not _exit_code and own:
        global _say
        _say, sys.excepthook = sys.excepthook, _exit_code
    return Run(
        servers=listed,
        rank=rank,
        workers=workers,
        job=job,
        settings=lines,
        fleet=fleet,
        run_dir=run_dir or os.environ.get("PARAFT_RUN_DIR"),
        resume=resume or os.environ.get("PARAFT_RESUME"),
        group=together,
    )
