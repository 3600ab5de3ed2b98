"""A training process's life: signals, forks, lost servers and workers, misuse, its end."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from torch import nn  # noqa: E402


def new(fleet: paraft.Fleet, name: str = "a", **options: Any) -> tuple[paraft.Run, nn.Module, torch.optim.Optimizer]:
    """The only worker of a job."""
    run = paraft.init(fleet, name=name)
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o, **options)
    return run, m, o


def one_step(m: nn.Module, o: torch.optim.Optimizer) -> None:
    models.loss(m, next(models.batches("mlp", 0, 1))).backward()
    o.step()
    o.zero_grad()


def ctrl_c(after: float) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(after), os.kill(os.getpid(), signal.SIGINT)))
    thread.start()
    return thread


def test_ctrl_c_ends_the_wait_for_workers_that_do_not_come(start_fleet: Any) -> None:
    # What torch imports when it is first used is imported.
    run, m, o = new(start_fleet(1))
    one_step(m, o)
    run.finish()
    waits = paraft.init(start_fleet(1), workers=2)
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    thread = ctrl_c(1.0)
    with pytest.raises(KeyboardInterrupt):
        waits.prepare(m, o)
    thread.join()


def interrupted(out: str, again: bool) -> int:
    """Worker 0 of two is interrupted while it waits for worker 1, and continues."""
    run = paraft.init()
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o)
    caught = 0
    for i, batch in enumerate(models.batches("mlp", run.rank, 6)):
        models.loss(m, batch).backward()
        if i == 3 and run.rank == 1:
            time.sleep(2)
        thread = ctrl_c(0.5) if i == 3 and run.rank == 0 else None
        try:
            o.step()
        except KeyboardInterrupt:
            caught += 1
            if again:
                o.step()  # what was pushed stays pushed
        if thread:
            thread.join()
        o.zero_grad()
    assert run.step == 6
    run.finish()
    torch.save(m.state_dict(), f"{out}/{run.rank}.pt")
    return caught


def test_a_step_that_was_interrupted_is_waited_for_again(start_fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    ends = []
    for again in (True, False):  # by calling step() again, or by going on with the next batch
        assert run_workers(start_fleet(1), interrupted, 2, str(tmp_path), again, timeout=180).values == [1, 0]
        a, b = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
        assert all(torch.equal(a[k], b[k]) for k in a)
        ends.append(a)
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0]), "both ways every step is trained once"


def test_a_forked_process_is_refused_and_harms_nobody(fleet: Any) -> None:
    run, m, o = new(fleet)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            one_step(m, o)
        except paraft.MisuseError as e:
            code = 7 if "forked" in str(e) else 2
        del run, m, o
        gc.collect()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    one_step(m, o)
    assert run.step == 1
    run.finish()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_loader_come_beside_the_run(context: str, fleet: Any) -> None:
    run, m, o = new(fleet)
    data = torch.utils.data.TensorDataset(torch.randn(64, 20), torch.zeros(64, dtype=torch.long))
    for batch in torch.utils.data.DataLoader(data, 16, num_workers=2, multiprocessing_context=context):
        models.loss(m, batch).backward()
        o.step()
        o.zero_grad()
    assert run.step == 4
    run.finish()


def test_a_run_is_not_pickled_and_its_model_is(fleet: Any) -> None:
    run, m, o = new(fleet)
    with pytest.raises(TypeError, match="paraft.init"):
        pickle.dumps(run)
    copy = pickle.loads(pickle.dumps(m))
    assert all(torch.equal(a, b) for a, b in zip(copy.parameters(), m.parameters()))
    assert len(pickle.dumps(m)) < 20_000
    run.finish()


def resources() -> tuple[int, int, int]:
    """Of this process: threads, descriptors, bytes in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


#: Values of a model of which a hundred would be seen.
LARGE = 200_000


def begins_often(counts: list[int]) -> list[tuple[int, int, int]]:
    """What the process has after so many runs, each with servers of its own."""
    seen = []
    for i in range(max(counts)):
        fleet = paraft.local(1)
        run = paraft.init(fleet)
        m = nn.Linear(LARGE, 1)
        o = torch.optim.SGD(m.parameters(), lr=0.1)
        run.prepare(m, o)
        before = resources()[0]
        for _ in range(2):
            m(torch.ones(4, LARGE)).sum().backward()
            o.step()
            o.zero_grad()
        if i % 4 or i + 1 in counts:
            run.finish()
        del run, m, o
        assert resources()[0] < before, "its thread has ended with it"
        fleet.close()
        del fleet
        if i + 1 in counts:
            gc.collect()
            seen.append(resources())
    return seen


def test_nothing_is_left_of_a_hundred_runs(run_workers: Any) -> None:
    (seen,) = run_workers(None, begins_often, 1, [20, 120], timeout=300).values
    (threads, files, memory), (threads_then, files_then, memory_then) = seen
    assert threads_then <= threads and files_then <= files, seen
    assert memory_then <= memory + 100 * LARGE * 4 // 4, "not a quarter of one vector each"


def test_a_loop_goes_on_when_a_server_is_killed(start_fleet: Any) -> None:
    fleet = start_fleet(3)
    run, m, o = new(fleet)
    plain = models.model("mlp")
    po = models.optimizer("sgd", plain)
    for i, batch in enumerate(models.batches("mlp", 0, 60)):
        if i == 20:
            fleet._processes[0].kill()
        for one, its in ((m, o), (plain, po)):
            models.loss(one, batch).backward()
            its.step()
            its.zero_grad()
    assert run.step == 60
    run.finish()
    # Exactly once: a lost or repeated push would show.
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(m.parameters(), plain.parameters()))


def test_a_fleet_without_its_majority_is_unavailable(start_fleet: Any) -> None:
    fleet = start_fleet(3)
    run = paraft.init(fleet, settings={"cluster.timeout_ms": 5_000})
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o)
    one_step(m, o)
    for process in fleet._processes[:2]:
        process.kill()
    with pytest.raises(paraft.UnavailableError, match="no leader") as e:
        for _ in range(3):
            one_step(m, o)
    with pytest.raises(paraft.MisuseError, match="has failed"):
        run.finish()
    assert e.value.exit_code == 69 and isinstance(e.value, ConnectionError)


def comes_back(flag: str, mark: bool) -> int:
    """Trains on from the servers' step until the mark exists; the second of worker 1's processes creates it."""
    run = paraft.init(mode="asp")
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o)
    first = run.step
    print("joined", flush=True)
    while not Path(flag).exists():
        for batch in models.batches("mlp", run.rank, 20):
            models.loss(m, batch).backward()
            o.step()
            o.zero_grad()
            time.sleep(0.01)
        if mark:
            Path(flag).touch()
    run.finish()
    return first


def test_a_killed_worker_comes_back_where_it_was(fleet: Any, start_workers: Any, tmp_path: Path) -> None:
    flag = str(tmp_path / "flag")
    workers = start_workers(fleet, comes_back, 2, flag, False)
    for w in workers:
        w.wait_for("joined", 120)
    time.sleep(1)
    workers[1].kill()
    # In its place, the same rank once more.
    env = {"PARAFT_RANK": "1", "PARAFT_WORKERS": "2"}
    again = start_workers(fleet, comes_back, 1, flag, True, env=env)
    assert again[0].wait(180) == 0, again[0].said()
    assert workers[0].wait(60) == 0, workers[0].said()
    assert again[0].value > 0 and workers[0].value == 0


def test_misuse_is_said_with_its_remedy_and_training_goes_on(start_fleet: Any) -> None:
    fleet = start_fleet(1)
    run, m, o = new(fleet)
    batch = next(models.batches("mlp", 0, 1))

    def said(kind: type[paraft.ParaftError], *words: str) -> Any:
        return pytest.raises(kind, match=".*".join(words))

    models.loss(m, batch).backward()
    m[0].weight.grad.mul_(0.5)
    with said(paraft.MisuseError, "changed", "clip_norm"):
        o.step()
    o.zero_grad()
    one_step(m, o)
    assert run.step == 1
    with said(paraft.MisuseError, "has its model"):
        run.prepare(m, o)
    o.param_groups[0]["momentum"] = 0.5
    with said(paraft.ConfigError, "momentum", "apply="):
        one_step(m, o)
    o.param_groups[0]["momentum"] = 0
    o.zero_grad()
    one_step(m, o)
    m[0].weight.data = m[0].weight.data.clone()
    with said(paraft.MisuseError, "0.weight", "other memory"):
        one_step(m, o)
    run.close()
    with said(paraft.MisuseError, "is over", "paraft.init"):
        run.report(1, 0.0)

    with said(paraft.ConfigError, "paraft launch"):
        paraft.init()
    run = paraft.init(fleet)
    with said(paraft.MisuseError, "prepare"):
        run.stats()
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(0), nn.Linear(4, 1))
    with said(paraft.ConfigError, "LBFGS", "worker"):
        run.prepare(net, torch.optim.LBFGS(net.parameters()), apply="servers")
    with said(paraft.ConfigError, "Rprop is none of the servers'"):
        run.prepare(net, torch.optim.Rprop(net.parameters()), apply="servers")
    with said(paraft.ConfigError, "not the model"):
        run.prepare(net, torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
    with said(paraft.ConfigError, "apply"):
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), apply="elsewhere")
    with said(paraft.ConfigError, "train.mode"):
        paraft.init(fleet, mode="sideways").prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))


def misuses(out: str, there: list[str]) -> list[str]:
    """Worker 1 of two makes one mistake before each of its steps, and receives the errors; worker 0 trains."""
    run = paraft.init()
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o)

    def clips() -> None:
        models.loss(m, next(models.batches("mlp", 1, 1))).backward()
        m[0].weight.grad.mul_(0.5)
        o.step()

    def prepares_again() -> None:
        run.prepare(m, o)

    def changes_the_optimizer() -> None:
        o.param_groups[0]["momentum"] = 0.5
        try:
            one_step(m, o)
        finally:
            o.param_groups[0]["momentum"] = 0

    def forks() -> None:
        child = os.fork()
        if child == 0:
            try:
                one_step(m, o)
            except paraft.MisuseError:
                os._exit(0)
            os._exit(1)
        if os.waitpid(child, 0)[1] == 0:
            raise paraft.MisuseError("the forked one was refused")

    def pickles() -> None:
        try:
            pickle.dumps(run)
        except TypeError as e:
            raise paraft.MisuseError(str(e)) from None

    def other(**options: Any) -> None:
        net = models.model("mlp")
        paraft.init(**options).prepare(net, models.optimizer("sgd", net))

    wrong = [
        clips,
        prepares_again,
        changes_the_optimizer,
        forks,
        pickles,
        lambda: other(mode="sideways"),
        lambda: other(rank=2),
        lambda: other(name="another"),
        lambda: other(resume=out),
        lambda: other(run_dir=f"{out}/a-file/run"),
        lambda: other(servers=there, settings={"cluster.timeout_ms": 1_000, "cluster.servers": 1, "cluster.replicas": 1}),
    ]
    said = []
    for i, batch in enumerate(models.batches("mlp", run.rank, len(wrong) + 4)):
        if run.rank == 1 and i < len(wrong):
            try:
                wrong[i]()
                said.append("nothing")
            except paraft.ParaftError as e:
                said.append(type(e).__name__)
            o.zero_grad()
        models.loss(m, batch).backward()
        if run.rank == 1 and i == len(wrong):
            m[0].bias.grad.fill_(torch.nan)
            try:
                o.step()
                said.append("nothing")
            except paraft.DivergedError:
                said.append("DivergedError")
        else:
            o.step()
        o.zero_grad()
    assert run.step == len(wrong) + 4
    run.finish()
    torch.save(m.state_dict(), f"{out}/{run.rank}.pt")
    return said


def test_what_one_worker_does_wrong_leaves_the_other_training(fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        there = [f"127.0.0.1:{nobody.getsockname()[1]}"]
        said = run_workers(fleet, misuses, 2, str(tmp_path), there).values
    misuse, config = "MisuseError", "ConfigError"
    expected = [misuse, misuse, config, misuse, misuse, config, config, config, "DataError", "RecordError", "UnavailableError"]
    assert said == [[], [*expected, "DivergedError"]]
    a, b = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(a[k], b[k]) for k in a), "in lock-step to the end"


def ends_early(fails: bool) -> None:
    run = paraft.init()
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o)
    one_step(m, o)
    if fails:
        raise RuntimeError("the script's own")


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_that_forgets_finish_is_told(fails: bool, fleet: Any, start_workers: Any) -> None:
    (worker,) = start_workers(fleet, ends_early, 1, fails)
    assert worker.wait(60) == int(fails)
    assert ("ends at step 1 without run.finish()" in worker.err) is not fails


def test_gradients_of_two_backward_passes_name_no_sync(fleet: Any) -> None:
    run, m, o = new(fleet, overlap=True)
    one_step(m, o)
    batch = next(models.batches("mlp", 0, 1))
    models.loss(m, batch).backward()
    with pytest.raises(paraft.MisuseError, match="no_sync"):
        models.loss(m, batch).backward()
    run.close()


def test_sparse_gradients_are_refused(fleet: Any) -> None:
    run = paraft.init(fleet)
    net = nn.Embedding(10, 4, sparse=True)
    o = torch.optim.SGD(net.parameters(), lr=0.1)
    run.prepare(net, o)
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(paraft.MisuseError, match="sparse=False"):
        o.step()
    run.close()


def test_non_finite_gradient_is_reported_and_run_continues(fleet: Any) -> None:
    run, m, o = new(fleet)
    one_step(m, o)
    before = [p.detach().clone() for p in m.parameters()]
    for p in m.parameters():
        p.grad = torch.full_like(p, torch.inf)
    with pytest.raises(paraft.DivergedError, match="infinity"):
        o.step()
    o.zero_grad()
    assert run.step == 2
    assert all(torch.equal(a, b) for a, b in zip(before, m.parameters()))
    one_step(m, o)
    assert run.step == 3
    run.finish()


def test_log_lines_come_through_logging(start_fleet: Any, caplog: Any) -> None:
    caplog.set_level("INFO", logger="paraft")
    run, m, o = new(start_fleet(1))
    one_step(m, o)
    run.finish()
    assert any("connected" in r.getMessage() for r in caplog.records)


def test_other_job_on_same_servers_is_refused_with_difference(fleet: Any) -> None:
    run, m, o = new(fleet)
    one_step(m, o)
    other = paraft.init(fleet)
    net = nn.Linear(3, 3)
    with pytest.raises(paraft.ConfigError, match="tensors"):
        other.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    one_step(m, o)
    assert run.step == 2
    run.finish()


def asks_in_a_handler(folder: str) -> list[Any]:
    """Worker 0 of two is interrupted by a signal while it waits for worker 1 in a step, and its handler asks the run."""
    run = paraft.init(settings={"checkpoint.dir": folder})
    m = models.model("mlp")
    o = models.optimizer("sgd", m)
    run.prepare(m, o)
    said: dict[str, str] = {}
    batches = list(models.batches("mlp", 0, 4))
    calls: dict[str, Any] = {
        "stats": lambda: run.stats()["step"],
        "mode": lambda: run.mode,
        "save": run.save,
        "finish": run.finish,
        "close": run.close,
        "report": lambda: run.report(1, 1.0),
        "step": o.step,
        "state": o.state_dict,
        "prepare": lambda: run.prepare(m, o),
        "backward": lambda: run._session.ready(0, 0),
    }

    def handler(*_: Any) -> None:
        for what, call in calls.items():
            try:
                said[what] = f"{call()}"
            except Exception as e:
                said[what] = type(e).__name__

    signal.signal(signal.SIGALRM, handler)
    for i, batch in enumerate(batches):
        models.loss(m, batch).backward()
        if i == 2 and run.rank == 1:
            time.sleep(1.5)
        if i == 2 and run.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        o.step()
        o.zero_grad()
    run.finish()
    return [run.step, said]


def test_signal_handler_is_answered_while_a_step_waits(fleet: Any, run_workers: Any, tmp_path: Path) -> None:
    step, said = run_workers(fleet, asks_in_a_handler, 2, str(tmp_path)).values[0]
    assert step == 4
    assert (said.pop("stats"), said.pop("mode")) == ("2", "bsp")
    assert said == dict.fromkeys(("save", "finish", "close", "report", "step", "state", "prepare", "backward"), "MisuseError")
