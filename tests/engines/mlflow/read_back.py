"""Compares what MLflow has with what lies in the folder of a run, or of a sweep. Uses MLflow's own client.

read_back.py URL run EXPERIMENT RUN_DIR STATUS | running EXPERIMENT RUN_DIR | sweep EXPERIMENT SWEEP_DIR
"""

import json
import math
import sys
import tomllib
from collections import Counter
from pathlib import Path

from mlflow import MlflowClient

url, what, experiment, folder = sys.argv[1:5]
folder = Path(folder)
client = MlflowClient(url)


def runs():
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id], max_results=1000))


def of(folder):
    found = [r for r in runs() if r.data.tags["paraft.run_dir"] == str(folder)]
    assert len(found) == 1, f"{len(found)} runs of {folder}"
    return found[0]


def events(folder):
    return [json.loads(line) for line in open(folder / "metrics.jsonl")]


def history(run, key):
    return [(p.step, p.value, p.timestamp) for p in client.get_metric_history(run.info.run_id, key)]


def flat(table, above=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def check_params(run, folder):
    job = dict(flat(tomllib.load(open(folder / "job.toml", "rb"))))
    wanted = {key: value for key, value in job.items() if not key.startswith("track.")}
    params = run.data.params
    assert set(params) == set(wanted), set(params) ^ set(wanted)
    for key, value in wanted.items():
        if isinstance(value, str):
            assert params[key] == value[:499] + "…" if len(value) > 500 else params[key] == value, (key, params[key], value)
        else:
            assert json.loads(params[key]) == value, (key, params[key], value)


def check_evals(run, folder):
    """Each evaluation once, with its number, at the time of its line."""
    lines = {(e["epoch"], e.get("final", False)): e for e in reversed(events(folder)) if e["event"] == "eval"}
    evals = sorted(lines.values(), key=lambda e: e["wall"])
    wanted = [e["accuracy"] for i, e in enumerate(evals) if i == 0 or not (e["final"] and e["loss"] == evals[i - 1]["loss"])]
    got = sorted(history(run, "eval/accuracy"), key=lambda p: (p[2], p[0]))
    assert [value for _, value, _ in got] == wanted, (got, wanted)


def check_run(run, folder):
    check_params(run, folder)
    check_evals(run, folder)
    losses = history(run, "train/loss")
    began = next(e for e in events(folder) if e["event"] == "run")
    before = began.get("resumed_step", 0) * began["batch"] * began["workers"]
    trained = before + sum({e["worker"]: e["samples"] for e in events(folder) if e["event"] in ("train", "worker")}.values())
    assert losses, "no training loss"
    assert max(Counter(step for step, _, _ in losses).values()) == 1, "a point is there twice"
    assert before < min(step for step, _, _ in losses) and max(step for step, _, _ in losses) <= trained, (losses, trained)
    assert all(not math.isinf(value) for _, value, _ in losses)
    assert run.info.start_time == int(began["wall"] * 1e3) and run.info.end_time >= run.info.start_time
    assert run.data.tags["paraft.version"] and run.data.tags["mlflow.source.name"] == "paraft"


if what == "running":
    run = of(folder)
    assert run.info.status == "RUNNING" and history(run, "train/loss") and history(run, "eval/accuracy")
elif what == "run":
    run = of(folder)
    assert run.info.status == sys.argv[5], run.info.status
    assert run.info.run_name == folder.name
    check_run(run, folder)
    if run.info.status == "FINISHED":
        trained = next(e["samples"] for e in events(folder) if e["event"] == "summary")
        assert max(step for step, _, _ in history(run, "train/loss")) == trained
else:
    parent = of(folder)
    assert parent.info.status == "FINISHED" and parent.info.run_name == folder.name
    trials = [r for r in runs() if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    folders = {str(p.parent) for p in folder.glob("trial-*/epochs-*/metrics.jsonl")}
    assert {r.data.tags["paraft.run_dir"] for r in trials} == folders and len(trials) == len(folders) > 6, len(trials)
    for trial in trials:
        assert trial.info.status == "FINISHED", trial.info.status
        check_run(trial, Path(trial.data.tags["paraft.run_dir"]))
    best = dict(flat(tomllib.load(open(folder / "best.toml", "rb"))))
    said = {key[len("best.") :]: json.loads(value) for key, value in parent.data.params.items()}
    assert set(said) == {"optimizer.lr", "model.hidden"}
    assert all(best[key] == value for key, value in said.items()), (best, said)
    # The best of those with all epochs, by MLflow's own numbers.
    whole = [r for r in trials if r.data.params["train.epochs"] == str(best["train.epochs"])]
    top = max(r.data.metrics["eval/accuracy"] for r in whole)
    assert parent.data.metrics["eval/accuracy"] == top, (parent.data.metrics, top)
    at = [r.data.params for r in whole if r.data.metrics["eval/accuracy"] == top]
    assert any(all(json.loads(p[key]) == value for key, value in said.items()) for p in at)
