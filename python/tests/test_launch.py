"""Scripts under ``python -m paraft.launch``, and what a worker reads from its environment there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import conftest
import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402


def launch(script: Path, *flags: str, env: dict[str, str] = {}) -> subprocess.CompletedProcess[str]:
    """``python -m paraft.launch FLAGS script``."""
    whole = {**os.environ, "PYTHONPATH": conftest.import_path(), **env}
    command = [sys.executable, "-m", "paraft.launch", *flags, str(script)]
    return subprocess.run(command, cwd=script.parent, env=whole, capture_output=True, text=True, timeout=240)


def test_a_script_runs_with_the_python_that_launches_it(tmp_path: Path) -> None:
    script = tmp_path / "tells.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], sys.executable, sys.argv[1:])\n")
    ended = launch(script, "--servers", "1", "--run-dir", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert (tmp_path / "run" / f"worker-{rank}.out").read_text() == f"{rank} {sys.executable} []\n"


def test_a_program_that_is_not_there_is_said_in_a_line(tmp_path: Path) -> None:
    ended = launch(tmp_path / "train.py", env={"PARAFT_PROGRAM": str(tmp_path / "paraft")})
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1 and "No such file" in ended.stderr


TRAINS = """
import models, paraft, paraft.torch
run = paraft.init()
m = models.model("mlp")
o = models.optimizer("sgd", m)
run.prepare(m, o)
for batch in models.batches("mlp", run.rank, 3):
    loss = models.loss(m, batch)
    loss.backward()
    LOG
    o.step()
    o.zero_grad()
run.finish()
"""


@pytest.mark.parametrize("says", [False, True])
def test_a_loss_that_no_script_has_said_is_none(says: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS.replace("LOG", "run.log(loss, len(batch[1]))" if says else "pass"))
    ended = launch(script, "--servers", "1", "--run-dir", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    assert "final loss" in ended.stdout and "NaN" not in ended.stdout, ended.stdout
    events = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (summary,) = (e for e in events if e["event"] == "summary")
    assert (summary["final_loss"] is not None) == says, summary


STEP = 0.03


def takes_its_time() -> float:
    """Seconds of six steps, each of which computes for ``STEP`` seconds."""
    run = paraft.init()
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o)
    began = time.monotonic()
    for batch in models.batches("mlp", 0, 6):
        time.sleep(STEP)
        models.loss(m, batch).backward()
        o.step()
        o.zero_grad()
    took = time.monotonic() - began
    run.finish()
    return took


def test_a_worker_that_is_made_slower_is(fleet: Any, run_workers: Any) -> None:
    env = {"PARAFT_SLOW": "11", "PARAFT_STRAGGLE": "1:2x"}
    (took,) = run_workers(fleet, takes_its_time, 1, env=env).values
    # The first step's time is not known, and the second's is known once it is made.
    assert took >= 6 * STEP + 4 * 21 * STEP


@pytest.mark.parametrize(("name", "text"), [("PARAFT_SLOW", "fast"), ("PARAFT_SLOW", "0.5"), ("PARAFT_STRAGGLE", "often")])
def test_nonsense_in_the_environment_is_refused(name: str, text: str, fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    m = models.model("mlp")
    with pytest.raises(paraft.ConfigError, match=text):
        paraft.init(fleet).prepare(m, models.optimizer("sgd", m))
