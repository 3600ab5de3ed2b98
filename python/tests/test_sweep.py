"""Sweeps with Optuna: trials are jobs of a real fleet, are pruned by their own evaluations, and leave nothing there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

optuna = pytest.importorskip("optuna")

import paraft  # noqa: E402
import paraft.sweep  # noqa: E402
from conftest import import_path  # noqa: E402
from optuna.trial import TrialState  # noqa: E402
from paraft._fleet import program  # noqa: E402

JOB = """
name = "digits"
seed = 1
[model]
kind = "mlp"
hidden = [8]
[data]
kind = "digits"
[train]
workers = 1
epochs = 2
device = "cpu"
[optimizer]
kind = "sgd"
[cluster]
servers = 1
replicas = 1
"""

SPACE = """
[space]
"optimizer.lr" = { min = 0.01, max = 0.5, log = true, points = 3 }
train = { batch = [16, 32] }
"model.hidden" = [[8], [16, 8]]
"""


class Pruner(optuna.pruners.BasePruner):  # type: ignore[misc,name-defined]
    """Does this to a trial after each of its evaluations; what it returns says whether the trial is pruned."""

    def __init__(self, does: Callable[[Any], bool]) -> None:
        self.does = does

    def prune(self, study: Any, trial: Any) -> bool:
        return self.does(trial)


@pytest.fixture(scope="module")
def standing() -> Iterator[paraft.Fleet]:
    """One server, for all tests of this file."""
    with paraft.local(1) as fleet:
        yield fleet


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "space.toml").write_text(SPACE)
    return tmp_path / "job.toml"


def study(**options: Any) -> Any:
    options.setdefault("direction", "maximize")
    return optuna.create_study(**{"sampler": optuna.samplers.RandomSampler(seed=3), "pruner": optuna.pruners.NopPruner(), **options})


def jobs(fleet: paraft.Fleet) -> list[str]:
    """The names of the jobs that the fleet has."""
    env = {**os.environ, "PARAFT_CERTS": fleet.certs or ""}
    said = subprocess.run([program(), "jobs", "--json", "--fleet", ",".join(fleet.servers)], env=env, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return [j["job"] for line in said.stdout.splitlines() for j in json.loads(line)["jobs"]]


def running(folder: Path) -> list[int]:
    """Processes that have this folder among their arguments: a trial's launcher, and its workers."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            said = (process / "cmdline").read_bytes() if process.name.isdecimal() else b""
        except OSError:
            continue
        if str(folder).encode() in said:
            found.append(int(process.name))
    return found


def wait(what: str, is_so: Callable[[], Any], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"not in {seconds:g} s: {what}"
        time.sleep(0.02)


def test_trials_are_jobs_of_a_fleet_and_leave_nothing_there(job: Path, standing: paraft.Fleet) -> None:
    s = study()
    paraft.sweep.optimize(s, job, "space.toml", n_trials=3, fleet=standing)
    assert [t.state for t in s.trials] == [TrialState.COMPLETE] * 3
    assert jobs(standing) == []
    for trial in s.trials:
        run = Path(trial.user_attrs["run_dir"])
        assert run.parent.parent == job.parent / "runs" / "digits-sweep-1"
        record = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert trial.value == record[-1]["final_accuracy"]
        assert trial.intermediate_values == {e["epoch"]: e["accuracy"] for e in record if e["event"] == "eval" and not e["final"]}
        assert sorted(trial.intermediate_values) == [1, 2]
        # What was suggested is what was trained.
        began = record[0]
        assert (began["lr"], began["batch"]) == (pytest.approx(trial.params["optimizer.lr"], rel=1e-6), trial.params["train.batch"])
        resolved = (run / "job.toml").read_text().split("[data]")[0]
        widths = [int(line.strip(" ,")) for line in resolved.splitlines() if line.strip(" ,").isdigit()]
        assert widths == json.loads(trial.params["model.hidden"])


def test_study_continues_with_function_on_own_servers(job: Path) -> None:
    s = study(direction="minimize")

    def suggest(trial: Any) -> dict[str, Any]:
        return {"optimizer.lr": trial.suggest_float("lr", 0.01, 0.1)}

    for trials in (1, 2):
        paraft.sweep.optimize(s, job, suggest, n_trials=1, run_dir="sweep", settings={"train.epochs": 1})
        assert [t.state for t in s.trials] == [TrialState.COMPLETE] * trials
    for trial in s.trials:
        run = Path(trial.user_attrs["run_dir"])
        assert run == job.parent / "sweep" / f"trial-{trial.number:04}" / "try-1"
        summary = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        assert trial.value == summary["final_loss"]


def test_a_pruned_trial_is_ended_by_its_own_evaluations(job: Path, standing: paraft.Fleet) -> None:
    """It would train for hours; the next one trains on its cores."""
    s = study(pruner=Pruner(lambda trial: trial.number == 0 and trial.last_step >= 2))

    def suggest(trial: Any) -> dict[str, Any]:
        return {"optimizer.lr": trial.suggest_float("lr", 0.01, 0.1), "train.epochs": 1_000_000 if trial.number == 0 else 1}

    paraft.sweep.optimize(s, job, suggest, n_trials=2, fleet=standing, run_dir="sweep")
    first, second = s.trials
    assert (first.state, second.state) == (TrialState.PRUNED, TrialState.COMPLETE)
    assert first.value == first.intermediate_values[first.last_step]
    assert running(job.parent / "sweep") == []
    assert jobs(standing) == []


def test_what_diverges_or_is_refused_fails_and_the_others_go_on(job: Path, standing: paraft.Fleet) -> None:
    s = study()
    settings: list[dict[str, Any]] = [{}, {"optimizer.lr": 1e30}, {"optimizer.kind": "no such"}, {"train.batch": 64}]
    paraft.sweep.optimize(s, job, lambda trial: settings[trial.number], n_trials=4, fleet=standing)
    assert [t.state for t in s.trials] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.FAIL, TrialState.COMPLETE]
    assert "diverged" in s.trials[1].user_attrs["why"]
    assert "optimizer.kind" in s.trials[2].user_attrs["why"]
    assert [t.user_attrs["tries"] for t in s.trials] == [1, 1, 1, 1]
    assert jobs(standing) == []


@pytest.mark.parametrize("kills", [1, 3])
def test_a_killed_trial_is_tried_three_times(job: Path, standing: paraft.Fleet, kills: int) -> None:
    killed: list[str] = []
    s: Any = None

    def kill(trial: Any) -> bool:
        run = trial.user_attrs["run_dir"]
        if len(killed) < kills and run not in killed:
            killed.append(run)
            for process in running(Path(run)):
                os.kill(process, signal.SIGKILL)
        return False

    s = study(pruner=Pruner(kill))
    # Another attempt has reported the first epochs: the pruner receives only later ones.
    epochs = {"train.epochs": 400}
    paraft.sweep.optimize(s, job, lambda trial: epochs, n_trials=1, fleet=standing)
    (trial,) = s.trials
    assert len(killed) == kills
    if kills < 3:
        assert (trial.state, trial.user_attrs["tries"]) == (TrialState.COMPLETE, kills + 1)
        assert sorted(trial.intermediate_values) == list(range(1, 401))
    else:
        assert (trial.state, trial.user_attrs["tries"]) == (TrialState.FAIL, 3)
        assert "killed" in trial.user_attrs["why"]
    assert jobs(standing) == []


def test_parallel_trials_have_own_cores_unless_set(job: Path, standing: paraft.Fleet) -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(paraft.ConfigError, match=f"parallel={cores + 1}.*share_cores=True"):
        paraft.sweep.optimize(study(), job, "space.toml", n_trials=2, fleet=standing, parallel=cores + 1)
    with pytest.raises(paraft.ConfigError, match="take parallel=1"):
        paraft.sweep.optimize(study(), job, "space.toml", n_trials=2, fleet=standing, parallel=2, settings={"train.workers": cores})
    at_once: list[int] = []

    def look(trial: Any) -> bool:
        at_once.append(len({int(t.number) for t in s.get_trials(deepcopy=False, states=[TrialState.RUNNING]) if t.intermediate_values}))
        return max(at_once) > 1 and trial.last_step > 5

    s = study(pruner=Pruner(look))
    endless = {"train.epochs": 1_000_000}
    paraft.sweep.optimize(s, job, lambda trial: endless, n_trials=2, fleet=standing, parallel=2, share_cores=True)
    assert [t.state for t in s.trials] == [TrialState.PRUNED] * 2
    # Each wants all cores: one after the other, though two may train at a time.
    if cores > 1:
        at_once = []
        s = study(pruner=Pruner(look))
        whole = {"train.epochs": 200, "train.workers": cores}
        paraft.sweep.optimize(s, job, lambda trial: whole, n_trials=2, fleet=standing, parallel=2)
        assert [t.state for t in s.trials] == [TrialState.COMPLETE] * 2 and max(at_once) == 1
    assert jobs(standing) == []


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_ended_ends_its_trials(job: Path, standing: paraft.Fleet, sign: signal.Signals) -> None:
    code = """
import optuna, paraft.sweep, sys
study = optuna.create_study(direction="maximize")
try:
    paraft.sweep.optimize(study, "job.toml", lambda t: {"train.epochs": 1_000_000}, n_trials=2, fleet=sys.argv[1], parallel=1, run_dir="sweep")
except KeyboardInterrupt:
    print(*(t.state.name for t in study.trials))
"""
    env = {**os.environ, "PYTHONPATH": import_path(), "PARAFT_CERTS": standing.certs or ""}
    sweep = subprocess.Popen([sys.executable, "-c", code, ",".join(standing.servers)], env=env, stdout=subprocess.PIPE, text=True)
    record = job.parent / "sweep" / "trial-0000" / "try-1" / "metrics.jsonl"
    wait("it trains", lambda: record.exists() and '"eval"' in record.read_text())
    assert running(record.parent)
    sweep.send_signal(sign)
    said, _ = sweep.communicate(timeout=60)
    wait("its trial has ended", lambda: not running(record.parent), 30)
    if sign == signal.SIGINT:
        assert said.split() == ["FAIL"]
        assert jobs(standing) == []
    else:
        assert jobs(standing) == ["digits-trial-0"]  # no process was left to delete it
        subprocess.run([program(), "delete", "digits-trial-0", "--fleet", ",".join(standing.servers)], env=env, check=True)


def test_what_is_wrong_is_said_before_a_trial_begins(job: Path, standing: paraft.Fleet) -> None:
    def refused(said: str, s: Any = None, space: Any = "space.toml", of: Any = job, **options: Any) -> None:
        s = s or study()
        with pytest.raises(paraft.ConfigError, match=said):
            paraft.sweep.optimize(s, of, space, **{"n_trials": 1, "fleet": standing, **options})
        assert len(s.trials) == 0

    refused("no-such.toml: No such file", of="no-such.toml")
    refused("n_trials=0", n_trials=0)
    refused("parallel=0", parallel=0)
    refused('direction="maximize"', s=study(direction="minimize"))
    refused("several directions", s=optuna.create_study(directions=["maximize", "minimize"]))
    for text, said in [
        ("", r"no \[space\]"),
        ("[space]", "empty"),
        ('metric = "speed"\n[space]\na = [1]', '"speed"'),
        ("[space]\na = []", "`a` has no values"),
        ("[space]\na = [1, 2, 1]", "`a` has 1 twice"),
        ("[space]\na = 3", "`a` = 3"),
        ("[space]\nb = { a = { min = 1 } }", "`b.a`: a range has min and max"),
        ("[space]\na = { min = 2, max = 1 }", "not below"),
        ("[space]\na = { min = 0.0, max = 1.0, log = true }", "above 0"),
        ("[space]\na = { min = 0, max = 1, steps = 3 }", "no `steps`"),
        ("[space]\na = { min = nan, max = 1 }", "no number"),
        ("other = 1\n[space]\na = [1]", "`other`"),
        ("[space", "space.toml: "),
    ]:
        Path("space.toml").write_text(text)
        refused(said, space="space.toml")
    assert not Path("runs").exists()
    # What only the job knows is said of the first trial, and is no trial's result.
    Path("space.toml").write_text('[space]\n"optimizer.rate" = [0.1]')
    with pytest.raises(paraft.ConfigError, match="optimizer.rate: unknown key"):
        paraft.sweep.optimize(study(), job, "space.toml", n_trials=2, fleet=standing)
    with pytest.raises(paraft.ConfigError, match=r"a = <object"):
        paraft.sweep.optimize(study(), job, lambda trial: {"a": object()}, n_trials=1, fleet=standing)
    with pytest.raises(paraft.UnavailableError):
        paraft.sweep.optimize(study(), job, lambda trial: {}, n_trials=1, fleet="127.0.0.1:9")


def test_without_optuna_it_says_what_to_install(job: Path) -> None:
    code = "import sys; sys.modules['optuna'] = None\nimport paraft.sweep\nparaft.sweep.optimize(None, 'job.toml', 'space.toml', n_trials=1)"
    env = {**os.environ, "PYTHONPATH": import_path()}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "ConfigError: paraft.sweep needs Optuna" in done.stderr and "pip install optuna" in done.stderr
