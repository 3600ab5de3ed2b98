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


@pytest.mark.parametrize(
    ("backward", "says", "known"),
    [
        ("loss.backward()", "run.log(loss, len(batch[1]))", True),
        ("loss.backward()", "pass", True),
        ("torch.autograd.backward(loss)", "pass", False),
        ("loss.backward(torch.tensor(0.5))", "pass", False),
    ],
)
def test_a_loss_is_recorded_where_it_can_be_known(backward: str, says: str, known: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n" + TRAINS.replace("loss.backward()", backward).replace("LOG", says))
    ended = launch(script, "--servers", "1", "--run-dir", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    assert "final loss" in ended.stdout and "NaN" not in ended.stdout, ended.stdout
    events = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (summary,) = (e for e in events if e["event"] == "summary")
    assert (summary["final_loss"] is not None) == known, summary


def test_values_under_names_of_ones_own_have_curves(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    logs = "run.log(loss, half=loss / 2, rank=run.rank, none=float('nan'))"
    script.write_text(TRAINS.replace("LOG", logs))
    ended = launch(script, "--servers", "1", "--run-dir", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [e for e in lines if e["event"] == "train"]
    for e in trained:
        values = e["values"]
        assert values["half"] == pytest.approx(e["loss"] / 2) and values["rank"] == e["worker"] and "none" not in values, e
        assert values["learning_rate"] > 0, e
    # The first step's is measured, and later ones' at intervals.
    assert {e["worker"] for e in trained if e["values"].get("gradient_norm", 0) > 0} == {0, 1}, trained
    assert '"title":"half"' in (tmp_path / "run" / "report.html").read_text()


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
    env = {"PARAFT_SLOW": "11,1:2x"}
    (took,) = run_workers(fleet, takes_its_time, 1, env=env).values
    # The first step's time is not known, and the second's is known once it is made.
    assert took >= 6 * STEP + 4 * 21 * STEP


@pytest.mark.parametrize(("value", "text"), [("fast", "fast"), ("0.5", "0.5"), ("1,often", "often")])
def test_nonsense_in_the_environment_is_refused(value: str, text: str, fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAFT_SLOW", value)
    m = models.model("mlp")
    with pytest.raises(paraft.ConfigError, match=text):
        paraft.init(fleet).prepare(m, models.optimizer("sgd", m))


AS_A_TASK = """
import json, os, models, paraft, paraft.torch
run = paraft.init()
m = models.model("mlp", seed=run.rank)
o = models.optimizer("sgd", m)
run.prepare(m, o)
for batch in models.batches("mlp", run.rank, 5):
    models.loss(m, batch).backward()
    o.step()
    o.zero_grad()
run.finish()
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
print("told " + json.dumps({
    "servers": run.servers,
    "sum": float(sum(p.double().sum() for p in m.parameters())),
    **{name: os.environ[name] for name in names},
}))
"""


def slurm(rank: int, tasks: int, job: int) -> dict[str, str]:
    """What ``srun`` tells a task of two on the first node and the rest on the second."""
    local = {"SLURM_NODEID": str(int(rank >= 2)), "SLURM_LOCALID": str(rank % 2), "SLURM_STEP_TASKS_PER_NODE": f"2,{tasks - 2}"}
    step = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost,other", "SLURM_STEP_NUM_NODES": "2"}
    return {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_NTASKS": str(tasks), **local, **step}


def torchrun(rank: int, tasks: int, port: int) -> dict[str, str]:
    """What torchrun tells a worker."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    place |= {"WORLD_SIZE": str(tasks), "LOCAL_WORLD_SIZE": str(tasks)}
    return {**place, "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def open_mpi(rank: int, tasks: int, job: int) -> dict[str, str]:
    """What Open MPI's ``mpirun`` tells a rank."""
    place = {"RANK": str(rank), "SIZE": str(tasks), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(tasks)}
    return {**{f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}, "PMIX_NAMESPACE": f"prterun-n1-{job}@1"}


def pod(rank: int, tasks: int, port: int) -> dict[str, str]:
    """What an Indexed Job tells a pod, and its manifest."""
    return {"JOB_COMPLETION_INDEX": str(rank), "WORLD_SIZE": str(tasks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def tasks_of(script: Path, variables: list[dict[str, str]], *flags: str) -> list[subprocess.Popen[str]]:
    """``paraft launch`` once for each task, each in a folder of its own."""
    started = []
    for rank, own in enumerate(variables):
        folder = script.parent / f"task-{rank}"
        folder.mkdir(exist_ok=True)
        outer = ("SLURM_", "OMPI_", "PMI", "PARAFT_RANK", "RANK", "WORLD_SIZE", "MASTER_")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
        clean["PARAFT_INSECURE"] = "1"  # tasks that share no folder have no certificates
        whole = {**clean, "PYTHONPATH": conftest.import_path(), **own}
        command = [sys.executable, "-m", "paraft.launch", *flags, str(script)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=folder, env=whole, **pipes))
    return started


def ends(tasks: list[subprocess.Popen[str]], timeout: float = 120) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    try:
        said = [task.communicate(timeout=timeout) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    return [(task.returncode, out, err) for task, (out, err) in zip(tasks, said)]


@pytest.mark.parametrize(
    ("engine", "variables", "servers", "hosts"),
    [("Slurm", slurm, 3, "0011"), ("torchrun", torchrun, 1, "00"), ("Open MPI", open_mpi, 1, "00"), ("an Indexed Job", pod, 3, "012")],
)
def test_the_tasks_of_an_engine_are_one_fleet(engine: str, variables: Any, servers: int, hosts: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(AS_A_TASK)
    tasks, by = len(hosts), conftest._free_port()
    ended = ends(tasks_of(script, [variables(rank, tasks, by) for rank in range(tasks)]))
    assert [code for code, _, _ in ended] == [0] * tasks, ended
    told = [json.loads(line[5:]) for _, out, _ in ended for line in out.splitlines() if line.startswith("told ")]
    assert len(told) == tasks and len({t["sum"] for t in told}) == 1, "trained together"
    assert len({tuple(t["servers"]) for t in told}) == 1 and len(set(told[0]["servers"])) == servers, "by the same servers"
    assert [t["RANK"] for t in told] == [str(rank) for rank in range(tasks)]
    assert "".join(t["GROUP_RANK"] for t in told) == hosts and {t["WORLD_SIZE"] for t in told} == {str(tasks)}
    assert len({(t["MASTER_ADDR"], t["MASTER_PORT"]) for t in told}) == 1
    for rank, (_, _, err) in enumerate(ended):
        brings = "a worker and a server;" if rank < servers else "a worker;"
        assert err.startswith(f"{engine}: task {rank} of {tasks}, {brings}"), err
    assert "final loss" in ended[0][1], "the first has the record"
    runs = [str(p.relative_to(tmp_path)) for p in tmp_path.glob("task-*/runs/*")]
    assert runs == ["task-0/runs/train-1"], "and no other began a run of its own"


def test_torchrun_itself_starts_one_fleet(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(AS_A_TASK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    env = {**os.environ, "PYTHONPATH": conftest.import_path(), "PARAFT_INSECURE": "1"}
    command += [sys.executable, "-m", "paraft.launch", str(script)]
    # The port after torchrun's own may be in use.
    for _ in range(3):
        ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        if "Address already in use" not in ended.stderr:
            break
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line.partition("told ")[2]) for line in ended.stdout.splitlines() if "told " in line]
    assert sorted(t["RANK"] for t in told) == ["0", "1"] and len({t["sum"] for t in told}) == 1, ended.stdout
    assert [p.name for p in tmp_path.glob("runs/*")] == ["train-1"]


def test_a_task_whose_script_fails_ends_all(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)\n")
    ended = ends(tasks_of(script, _three(slurm)))
    assert [code for code, _, _ in ended] == [7, 7, 7], ended
    assert "the script of task 1 has failed" in ended[0][2] and "the script of task 1 has failed" in ended[2][2]


def _three(variables: Any) -> list[dict[str, str]]:
    by = conftest._free_port()
    return [variables(rank, 3, by) for rank in range(3)]


def test_a_task_that_is_killed_comes_back_to_the_others(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, time, models, paraft, paraft.torch\n"
        "run = paraft.init(mode='asp')\n"
        "m = models.model('mlp')\n"
        "o = models.optimizer('sgd', m)\n"
        "run.prepare(m, o)\n"
        f"flag = {str(tmp_path / 'back')!r}\n"
        "again = os.path.exists(flag + '-1')\n"
        "open(f'{flag}-{run.rank}', 'w').close()\n"
        "while not os.path.exists(flag):\n"
        "    for batch in models.batches('mlp', run.rank, 10):\n"
        "        models.loss(m, batch).backward()\n"
        "        o.step()\n"
        "        o.zero_grad()\n"
        "        time.sleep(0.01)\n"
        "    if again and run.rank == 1: open(flag, 'w').close()\n"
        "run.finish()\n"
        "print('finished', run.step)\n"
    )
    variables = _three(slurm)
    tasks = tasks_of(script, variables)
    until = time.monotonic() + 90
    while not all((tmp_path / f"back-{rank}").exists() for rank in range(3)):
        assert time.monotonic() < until and all(t.poll() is None for t in tasks), ends(tasks, 1)
        time.sleep(0.05)
    tasks[1].kill()
    tasks[1].communicate()
    (tasks[1],) = tasks_of(script, [variables[1]])
    ended = ends(tasks)
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert all("finished" in out for _, out, _ in ended)


def test_impossible_fleet_of_tasks_is_refused_with_numbers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trains')\n")
    by = conftest._free_port()
    two_there = {"SLURM_STEP_TASKS_PER_NODE": "2"}
    two = slurm(0, 2, by) | two_there
    for variables, flags, words in [
        (two, ["--servers", "3", "--replicas", "1"], ("3 servers", "2 tasks")),
        (two, ["--workers", "4"], ("--workers 4", "2 tasks")),
        (two, ["--set", "train.workers=5"], ("5 workers", "2 tasks")),
        (two, ["--trace"], ("--trace", "2 tasks")),
        ({"JOB_COMPLETION_INDEX": "1"}, [], ("pod 1", "--workers N")),
    ]:
        ((code, out, err),) = ends(tasks_of(script, [variables], *flags))
        assert code == 2 and "trains" not in out and all(w in err for w in words), (code, err)
    held = tasks_of(script, _three(slurm)[:2])
    time.sleep(1)
    assert all(t.poll() is None for t in held), "they wait for the third"
    for task in reversed(held):
        task.terminate()
        ((code, _, err),) = ends([task], 20)
        assert code == 143 and "interrupted" in err, (code, err)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "metrics.jsonl").write_text("{}")
    first, second = ends(tasks_of(script, [slurm(rank, 2, by) | two_there for rank in range(2)], "--run-dir", str(taken)), 60)
    assert first[0] == 78 and "holds another run" in first[2]
    assert second[0] == 69 and "task 0" in second[2] and "holds another run" in second[2], second


def test_one_task_alone_launches_as_anywhere(tmp_path: Path) -> None:
    script = tmp_path / "tells.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    one = slurm(0, 1, 7) | {"SLURM_STEP_TASKS_PER_NODE": "1"}
    ((code, out, err),) = ends(tasks_of(script, [one], "--servers", "1", "--workers", "2"))
    assert code == 0 and "rank 0 of 2" in out and "task" not in err, (code, out, err)
