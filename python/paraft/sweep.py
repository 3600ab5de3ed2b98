"""Sweeps with any sampler and pruner of `Optuna <https://optuna.org>`_: their trials are jobs of one fleet::

    import optuna, paraft.sweep

    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.HyperbandPruner())
    paraft.sweep.optimize(study, "mnist.toml", "space.toml", n_trials=64)
    print(study.best_params)

``paraft sweep`` does the same without Python and Optuna, with its own searches (docs/sweeps.md).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

from ._fleet import Fleet, local, program
from ._record import METRICS, Tail
from ._run import toml
from ._space import Settings, read_toml, suggestions
from .errors import ConfigError, DataError, ParaftError, RecordError, UnavailableError

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

__all__ = ["optimize"]

#: A child of Optuna's logger: ``optuna.logging.set_verbosity`` applies to these lines too.
_LOG = logging.getLogger("optuna.paraft")

#: Maximum attempts of a trial that is killed.
_TRIES = 3
#: The interval of reads of a trial's record.
_LOOK_SECONDS = 0.05
#: How long a run may take to end after a signal; then it is killed.
_END_SECONDS = 20.0
#: Timeout of a request to the fleet.
_ASK_SECONDS = 60.0


def optimize(
    study: Study,
    job: Union[str, os.PathLike[str]],
    space: Union[str, os.PathLike[str], Callable[[Trial], Settings]],
    *,
    n_trials: int,
    fleet: Union[Fleet, str, os.PathLike[str], None] = None,
    parallel: Optional[int] = None,
    share_cores: bool = False,
    settings: Optional[Settings] = None,
    run_dir: Union[str, os.PathLike[str], None] = None,
) -> None:
    """Trains ``n_trials`` trials of a study, each as a job of one fleet, and reports their results to the study.

    The result is the held-out accuracy for a study that maximizes, the held-out loss for one that minimizes.
    Intermediate evaluations are reported to the trial with their epoch as the step (with ``eval.every_steps`` their own
    step), so that the study's pruner can end it; a pruned trial's job is deleted from the fleet like any other. A trial
    that diverges, or whose settings the job refuses, gets the state ``FAIL``. A killed trial is attempted again, at most
    three times in all. The user attributes of each trial have its run's folder (``run_dir``), its attempts (``tries``),
    and its failure (``why``).

    Args:
        study: of :func:`optuna.create_study`, with one direction. It may have trials already, and share its storage
            with other machines.
        job: a job file (docs/configuration.md).
        space: a space file, as for ``paraft sweep`` (docs/sweeps.md), or a function from the trial to its settings:
            ``lambda trial: {"optimizer.lr": trial.suggest_float("lr", 1e-3, 1, log=True)}``.
        n_trials: the number of new trials.
        fleet: a standing fleet, as ``--fleet`` takes it: a run's folder, a job file, servers as comma-separated
            ``host:port``, or a fleet of :func:`paraft.local`. Default: the sweep's own servers on this machine, as
            many as ``cluster.servers``.
        parallel: concurrent trials. Default: as many as have their own cores.
        share_cores: let concurrent trials share cores, which distorts their times.
        settings: keys of the job file, for all trials.
        run_dir: the folder of the trials' folders. Default: ``runs/NAME-sweep-N``, with the first free N.

    Raises:
        ConfigError: Optuna is missing, or the job, the space or the study is invalid.
        UnavailableError: the fleet is not reached. Finished trials are reported; the same call continues the study.
        RecordError: a file cannot be written.
    """
    optuna = _optuna()
    if n_trials < 1:
        raise ConfigError(f"n_trials={n_trials}: a sweep has at least one trial")
    if len(study.directions) != 1:
        raise ConfigError("the study has several directions: make it with create_study(direction=\"maximize\") or \"minimize\"")
    metric = "accuracy" if study.direction == optuna.study.StudyDirection.MAXIMIZE else "loss"
    suggest = suggestions(space, metric)
    table, fixed = read_toml(Path(job)), dict(settings or {})
    cores = _cores()
    ranks = _ranks(table, fixed)
    own = max(1, cores // ranks)
    at_a_time = own if parallel is None else parallel
    if at_a_time < 1:
        raise ConfigError(f"parallel={parallel}: at least one trial trains at a time")
    if at_a_time > own and not share_cores:
        raise ConfigError(
            f"parallel={at_a_time}: {at_a_time * ranks} workers at a time would share {cores} cores; "
            f"take parallel={own}, or say share_cores=True where times do not matter"
        )
    name = str(fixed.get("name") or table.get("name") or Path(job).stem)
    with contextlib.ExitStack() as ends:
        if fleet is None:
            fleet = ends.enter_context(local(_whole(table, fixed, "cluster.servers", 3)))
        sweep = _Sweep(
            study=study,
            job=Path(job),
            table=table,
            name=name,
            suggest=suggest,
            metric=metric,
            settings=fixed,
            fleet=fleet,
            folder=_folder(run_dir, name),
            cores=None if share_cores else _Cores(cores),
            trials=n_trials,
        )
        pool = ends.enter_context(ThreadPoolExecutor(at_a_time, thread_name_prefix="paraft-sweep"))
        # Not `Thread.join`: before Python 3.13 Ctrl-C in it marks a running thread as ended.
        working = [pool.submit(sweep.work) for _ in range(min(at_a_time, n_trials))]
        try:
            futures.wait(working)
        except BaseException:
            sweep.stop.set()
            futures.wait(working)
            raise
    if sweep.failed is not None:
        raise sweep.failed


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as e:
        raise ConfigError(f"paraft.sweep needs Optuna, and there is no module `{e.name}`: pip install optuna") from None
    return optuna


# ---- the job ----


def _value(job: Mapping[str, Any], settings: Settings, key: str, default: Any) -> Any:
    """The value of a job's key after the settings."""
    if key in settings:
        return settings[key]
    table: Any = job
    for part in key.split("."):
        table = table.get(part, {}) if isinstance(table, Mapping) else {}
    return default if isinstance(table, Mapping) else table


def _whole(job: Mapping[str, Any], settings: Settings, key: str, default: int) -> int:
    value = _value(job, settings, key, default)
    if not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key} = {value!r}: it is a whole number")
    return value


def _ranks(job: Mapping[str, Any], settings: Settings) -> int:
    """Training processes: the ranks of all workers."""
    number = functools.partial(_whole, job, settings)
    mesh = number("parallel.pipeline", 1) * number("parallel.tensor", 1)
    return max(1, number("train.workers", 2) * number("train.group_size", 1) * mesh)


def _assignment(key: str, value: Any) -> str:
    """An assignment for ``--set``."""
    try:
        if value is None:
            raise TypeError
        return f"{key}={toml(value)}"
    except TypeError:
        raise ConfigError(f"{key} = {value!r}: a setting is a number, a string, true or false, or a list or table of such") from None


def _folder(given: Union[str, os.PathLike[str], None], name: str) -> Path:
    """The sweep's folder, created."""
    try:
        if given is not None:
            os.makedirs(given, exist_ok=True)
            return Path(given)
        os.makedirs("runs", exist_ok=True)
        n = 1
        while True:
            folder = Path("runs", f"{name}-sweep-{n}")
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                n += 1
    except OSError as e:
        raise RecordError(f"the sweep's folder: {e}; choose another with run_dir=") from None


# ---- trials ----


class _Cores:
    """The cores of this machine, which trials reserve before they train. First come, first served."""

    def __init__(self, cores: int) -> None:
        self._all = cores
        #: Guarded by the condition.
        self._free = cores
        self._changed = threading.Condition()
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def taken(self, ranks: int) -> Iterator[None]:
        """Reserves ``ranks`` of them, or all if there are fewer."""
        cores = min(ranks, self._all)
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._free >= cores)
            self._free -= cores
        try:
            yield
        finally:
            with self._changed:
                self._free += cores
                self._changed.notify_all()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


#: Ends with the thread that started it, even if that is killed: otherwise a trial would train without a sweep.
_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass
class _Ended:
    """The result of an attempt. Without a value, ``why`` has the reason."""

    value: Optional[float] = None
    pruned: bool = False
    #: A further attempt may succeed.
    again: bool = False
    why: str = ""


class _Interrupted(Exception):
    """The sweep must stop."""


@dataclass
class _Watch:
    """A trial's reports. Of several attempts only the first to make an evaluation reports it."""

    trial: Trial
    metric: str
    reported: set[int]

    def report(self, event: Mapping[str, Any]) -> bool:
        """Reports an evaluation; returns whether to prune the trial."""
        number, value = event.get("step", event.get("epoch")), event.get(self.metric)
        if not isinstance(number, int) or not isinstance(value, (int, float)) or number in self.reported:
            return False
        self.reported.add(number)
        self.trial.report(float(value), number)
        return not event.get("final") and self.trial.should_prune()


class _Sweep:
    """State shared by the threads that train trials."""

    def __init__(
        self,
        *,
        study: Study,
        job: Path,
        table: Mapping[str, Any],
        name: str,
        suggest: Callable[[Trial], Settings],
        metric: str,
        settings: dict[str, Any],
        fleet: Union[Fleet, str, os.PathLike[str]],
        folder: Path,
        cores: Optional[_Cores],
        trials: int,
    ) -> None:
        self._study = study
        self._job = job
        self._table = table
        self._name = name[:80]
        self._suggest = suggest
        self._metric = metric
        self._settings = settings
        self._folder = folder
        self._cores = cores
        self._paraft = program()
        self._env = dict(os.environ)
        if isinstance(fleet, Fleet):
            self._fleet = ",".join(fleet.servers)
            if fleet.certs is not None:
                self._env["PARAFT_CERTS"] = fleet.certs
        else:
            self._fleet = os.fspath(fleet)
        self.stop = threading.Event()
        self.failed: Optional[BaseException] = None
        #: Guards the following fields, and ``failed``.
        self._lock = threading.Lock()
        #: Remaining trials to ask for.
        self._left = trials
        #: Whether any trial has started to train, which shows that the job itself is valid.
        self._trained = False

    def work(self) -> None:
        """Trains one trial after another, until there are none."""
        while self._takes_one():
            try:
                self._one()
            except _Interrupted:
                return
            except BaseException as e:
                with self._lock:
                    self.failed = self.failed or e
                self.stop.set()
                return

    def _takes_one(self) -> bool:
        with self._lock:
            if self.stop.is_set() or self._left == 0:
                return False
            self._left -= 1
            return True

    def _one(self) -> None:
        """Asks for a trial, trains it, and reports its result."""
        from optuna.exceptions import TrialPruned
        from optuna.trial import TrialState

        trial = self._study.ask()
        try:
            try:
                settings = {**self._settings, **self._suggest(trial)}
                with self._cores.taken(_ranks(self._table, settings)) if self._cores else contextlib.nullcontext():
                    ended = self._trains(trial, settings)
            except TrialPruned:
                ended = _Ended(pruned=True)
            if ended.why:
                trial.set_user_attr("why", ended.why)
            if ended.value is not None:
                self._study.tell(trial, ended.value)
                _LOG.info("Trial %d finished with value: %s and parameters: %s.", trial.number, ended.value, trial.params)
            elif ended.pruned:
                self._study.tell(trial, state=TrialState.PRUNED)
                _LOG.info("Trial %d pruned.", trial.number)
            else:
                self._study.tell(trial, state=TrialState.FAIL)
                _LOG.warning("Trial %d failed with parameters: %s: %s", trial.number, trial.params, ended.why)
        except BaseException as e:
            with contextlib.suppress(Exception):  # it may be reported already, or the storage itself has failed
                trial.set_user_attr("why", str(e) or "interrupted")
            self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            raise

    def _trains(self, trial: Trial, settings: Settings) -> _Ended:
        watch = _Watch(trial, self._metric, set())
        ended = _Ended()
        for tries in range(1, _TRIES + 1):
            run = self._new_folder(trial.number)
            trial.set_user_attr("run_dir", str(run))
            trial.set_user_attr("tries", tries)
            try:
                ended = self._try(watch, settings, run)
            finally:
                self._delete(run)
            if not ended.again:
                break
            if tries < _TRIES:
                _LOG.warning("Trial %d: %s; try %d of %d", trial.number, ended.why, tries + 1, _TRIES)
        return ended

    def _new_folder(self, trial: int) -> Path:
        """A new folder for a run. Its name is not an earlier run's: a study's trials are numbered consecutively."""
        above = (self._folder / f"trial-{trial:04}").absolute()
        above.mkdir(exist_ok=True)
        n = 1
        while (above / f"try-{n}").exists() or (above / f"try-{n}.log").exists():
            n += 1
        return above / f"try-{n}"

    def _try(self, watch: _Watch, settings: Settings, run: Path) -> _Ended:
        """One run of the trial's job. An error of its settings is its result; an error of the fleet is raised."""
        if self.stop.is_set():
            raise _Interrupted
        settings = {**settings, "name": f"{self._name}-trial-{watch.trial.number}"}
        command = [self._paraft, "train", str(self._job), "--fleet", self._fleet, "--run-dir", str(run), "--json", "--no-dashboard"]
        for key, value in settings.items():
            command += ["--set", _assignment(key, value)]
        with_parent = [sys.executable, "-I", "-S", "-c", _WITH_PARENT, str(os.getpid())]
        log = run.with_name(run.name + ".log")
        with open(log, "wb") as said:
            # Not in our process group: Ctrl-C is for the sweep, which ends its trials.
            process = subprocess.Popen(
                [*with_parent, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=self._env,
                start_new_session=True,
            )
        tail = Tail(run / METRICS)
        summary: Optional[dict[str, Any]] = None
        diverged = ""
        try:
            while True:
                code = process.poll()  # poll before reading the record: then it has everything before the end
                for event in tail.read():
                    kind = event["event"]
                    if kind == "train" and not self._trained:
                        with self._lock:
                            self._trained = True
                    elif kind == "diverged":
                        diverged = str(event.get("reason"))
                    elif kind == "summary":
                        summary = event
                    elif kind == "eval" and watch.report(event):
                        return _Ended(pruned=True)
                if self.stop.is_set():
                    raise _Interrupted
                if code is not None:
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_SECONDS)
        finally:
            _end(process)
        if code == 0:
            value = (summary or {}).get(f"final_{self._metric}")
            if isinstance(value, (int, float)):
                return _Ended(value=float(value))
            return _Ended(why=f"it has no held-out {self._metric}")
        if diverged:
            return _Ended(why=diverged)
        why = _error_of(log) or (f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}")
        if code == UnavailableError.exit_code:
            raise UnavailableError(why)
        if code == RecordError.exit_code:
            raise RecordError(why)
        if code in (2, DataError.exit_code, ConfigError.exit_code):
            if not self._trained:
                raise ConfigError(f"the job is refused with the first trial's settings: {why}")
            return _Ended(why=why)
        return _Ended(again=True, why=why)

    def _delete(self, run: Path) -> None:
        """Deletes the trial's job from the fleet. The record stays in its folder, which has the fleet's name for
        it."""
        try:
            name = str(read_toml(run / "job.toml")["name"])
        except (ParaftError, KeyError):
            return  # the fleet has never had it
        command = [self._paraft, "delete", name, "--fleet", self._fleet]
        try:
            done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=_ASK_SECONDS)
            why = done.stderr.strip() if done.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"no answer in {_ASK_SECONDS:g} s"
        # A user may have deleted it before.
        if why and self._has(name):
            _LOG.warning("job %s is not deleted from the fleet, `paraft delete` does it: %s", name, why)

    def _has(self, name: str) -> bool:
        """Whether the fleet has a job of this name; true also if it cannot be asked."""
        command = [self._paraft, "jobs", "--fleet", self._fleet, "--json"]
        try:
            said = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True).stdout
            return any(job.get("job") == name and not job.get("released") for job in json.loads(said)["jobs"])
        except (subprocess.SubprocessError, ValueError, KeyError, TypeError):
            return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a run like a user would, if it has not ended yet."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _error_of(log: Path) -> str:
    """A run's last error message, with its advice."""
    text = log.read_text(errors="replace")
    at = text.rfind("error: ")
    return " ".join(line.strip() for line in text[at + len("error: ") :].splitlines()) if at >= 0 else ""
