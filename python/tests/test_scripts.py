"""Scripts of public kinds, each in ``scripts/``: as it trains under DDP, and with the lines of its ``.diff`` changed under Paraft."""

from __future__ import annotations

import difflib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import conftest
import pytest

torch = pytest.importorskip("torch")

SCRIPTS = conftest.TESTS / "scripts"
#: How many lines of a script may change.
LINES = 8

#: Each script, with how far apart its weights may be after DDP and after Paraft, of the largest one. SGD's gradients differ by the last bit
#: of a mean. Momentum makes more of it, and so does what divides by the root of a gradient's square, where that is small. clip_grad_norm_
#: divides by the norm plus 1e-6. A ReLU whose input is a last bit from zero lets a gradient pass in one run and not in the other, as in the
#: GAN's 46th step with torch 2.4.
BOUNDS = {
    "classifier": 1e-6,
    "gpt": 1e-4,
    "gan": 1e-3,
    "lstm": 1e-5,
    "vae": 1e-5,
    "actor_critic": 1e-4,
    "graph": 1e-5,
    "series": 2e-7,
}

#: The ends of both ranks under DDP, by script.
_UNDER_DDP: dict[str, list[dict[str, Any]]] = {}


def to_paraft(name: str) -> tuple[str, int]:
    """The script with its diff applied, and how many of its lines that changes."""
    before = (SCRIPTS / f"{name}.py").read_text().splitlines(keepends=True)
    after: list[str] = []
    at = 0
    for line in (SCRIPTS / f"{name}.diff").read_text().splitlines(keepends=True)[2:]:
        kind, text = line[0], line[1:]
        hunk = re.match(r"@@ -(\d+)", line)
        if hunk:
            begins = int(hunk[1]) - 1
            after += before[at:begins]
            at = begins
            continue
        if kind != "+":
            assert before[at] == text, f"{name}.diff is of another {name}.py, line {at + 1}"
            at += 1
        if kind != "-":
            after.append(text)
    after += before[at:]
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return "".join(after), sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")


def run_script(script: str, out: str) -> None:
    """A rank: what ``python script --out FOLDER`` would do."""
    sys.argv = [script, "--out", out]
    sys.path.insert(0, str(SCRIPTS))
    runpy.run_path(script, run_name="__main__")


def ends(folder: Path) -> list[dict[str, Any]]:
    """What both ranks have written, by names without those of DDP."""
    both = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    for end in both:
        end["weights"] = {re.sub(r"\bmodule\.", "", key): value for key, value in end["weights"].items()}
    return both


def trained(end: dict[str, Any]) -> dict[str, Any]:
    """Its weights, without running statistics, of which each rank of DDP has its own."""
    return {k: v for k, v in end["weights"].items() if v.is_floating_point() and "running" not in k}


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference, of the largest weight."""
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a) / max(float(w.abs().max()) for w in b.values())


def under_ddp(name: str, run_workers: Any, folder: Path) -> list[dict[str, Any]]:
    if name not in _UNDER_DDP:
        out = folder / "ddp"
        out.mkdir()
        run_workers(None, run_script, 2, str(SCRIPTS / f"{name}.py"), str(out))
        _UNDER_DDP[name] = ends(out)
    return _UNDER_DDP[name]


def trains_as_under_ddp(name: str, text: str, fleet: Any, run_workers: Any, folder: Path) -> None:
    """Trains a script with this text, and compares."""
    script, out = folder / f"{name}.py", folder / "paraft"
    script.write_text(text)
    out.mkdir()
    run_workers(fleet, run_script, 2, str(script), str(out))
    ours = ends(out)
    for end, ddp in zip(ours, under_ddp(name, run_workers, folder)):
        assert apart(trained(end), trained(ddp)) <= BOUNDS[name]
        assert end["losses"] == pytest.approx(ddp["losses"], abs=1e-4)
        assert end.get("rates") == ddp.get("rates")
    assert all(torch.equal(v, ours[1]["weights"][k]) for k, v in ours[0]["weights"].items() if "num_batches" not in k)


@pytest.mark.parametrize("name", BOUNDS)
def test_script_trains_as_under_ddp(name: str, fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    text, lines = to_paraft(name)
    assert lines <= LINES
    trains_as_under_ddp(name, text, fleet, run_workers, tmp_path)


@pytest.mark.parametrize("name", ["vae", "graph", "series"])
def test_script_whose_worker_is_killed_trains_on(name: str, run_workers: Any, tmp_path: Path) -> None:
    script, out, record = tmp_path / f"{name}.py", tmp_path / "paraft", tmp_path / "run"
    script.write_text(to_paraft(name)[0])
    out.mkdir()
    flags = ["--servers", "1", "--run-dir", str(record), "--set", "cluster.max_restarts=1"]
    command = [sys.executable, "-m", "paraft.launch", *flags, str(SCRIPTS / "dying.py"), str(tmp_path), str(script), "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((conftest.import_path(), str(SCRIPTS)))}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ours, theirs = ends(out), under_ddp(name, run_workers, tmp_path)
    steps = len(theirs[0]["losses"])
    assert len(ours[0]["losses"]) == steps
    assert 0 < len(ours[1]["losses"]) <= steps - 20, "rank 1 comes back, and goes on where it was"
    for key, value in ours[0]["weights"].items():
        assert value.isfinite().all() and (torch.equal(value, ours[1]["weights"][key]) or key.startswith("average.")), key
    for end, ddp in zip(ours, theirs):
        last, expected = (sum(e["losses"][-10:]) / 10 for e in (end, ddp))
        assert last == pytest.approx(expected, abs=0.02 * ddp["losses"][0])
