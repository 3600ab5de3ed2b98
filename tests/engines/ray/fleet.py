"""What is asserted of fleets in a Ray cluster: fleet.py FOLDER, a driver with a cluster of its own."""

import contextlib
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import paraft.ray
import ray
from ray.cluster_utils import Cluster
from ray.util.state import list_actors
from ray.util.state.exception import RayStateApiException

SCRATCH = Path(sys.argv[1])
BEGAN = time.monotonic()
STORE = 100 << 20


def say(text):
    print(f"{time.monotonic() - BEGAN:4.0f} s  {text}", flush=True)


def until(what, condition, seconds=600):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"gave up waiting for {what}"
        time.sleep(0.2)
    return found


def actors(run):
    """The living actors of a run, by their names."""
    # A busy dashboard does not answer in the time that Ray gives it.
    (all_of_them,) = until("Ray's list of actors", lambda: suppressed(RayStateApiException, lambda: [list_actors(detail=True, limit=1000)]))
    return {a.repr_name: a for a in all_of_them if a.state == "ALIVE" and a.repr_name.startswith(run)}


def record(run):
    events = SCRATCH / run / "metrics.jsonl"
    return [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []


def steps(run):
    return max((e["step"] for e in record(run) if e["event"] == "train"), default=0)


def steps_on(run):
    """It trains on: 20 steps more than now."""
    before = steps(run)
    until(f"steps of {run} after {before}", lambda: steps(run) > before + 20)


def servers_up(run):
    """Every server answers, and every replica votes."""
    asked = subprocess.run(
        [os.environ["PARAFT_PROGRAM"], "status", "--fleet", str(SCRATCH / run), "--wait", "whole", "--timeout", "600"], capture_output=True, text=True
    )
    assert asked.returncode == 0, asked.stdout + asked.stderr


def fit(run, train, *args, **more):
    """`paraft.ray.fit` in the background; what it returns or raises comes from the last function."""
    ended = []

    def call():
        try:
            ended.append(paraft.ray.fit(train, *args, run_dir=SCRATCH / run, **more))
        except Exception as e:  # noqa: BLE001
            ended.append(e)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()

    def result():
        thread.join(600)
        assert ended, f"{run} does not end"
        return ended[0]

    return result


def train(stop):
    """Fits a line until the file is there."""
    import numpy as np
    import paraft
    import paraft.numpy

    run = paraft.init()
    rng = np.random.default_rng(run.rank)
    trainer = paraft.numpy.prepare(run, {"w": np.zeros(8, np.float32)}, optimizer={"kind": "sgd", "lr": 0.05})
    while not os.path.exists(stop):
        x = rng.normal(size=(32, 8)).astype(np.float32)
        error = x @ trainer.params["w"] - x.sum(1)
        run.log(float((error**2).mean()), samples=32)
        trainer.step({"w": (2 * x.T @ error / 32).astype(np.float32)})
        time.sleep(0.01)
    run.finish()


def fails():
    import paraft

    if paraft.init().rank == 1:
        raise ArithmeticError("nothing adds up")
    time.sleep(1000)


def patient(*args, ask=ray._private.services.get_node):
    """Ray gives a node 30 s to start, whatever its settings: too few on a machine that computes something else."""
    return until("a node to start", lambda: suppressed(RuntimeError, ask, *args))


def suppressed(kind, call, *args):
    try:
        return call(*args)
    except kind:
        return None


def node(cpus):
    """What starts a node. A raylet aborts if its agents have not told it their ports after 30 s, whatever Ray's settings: it is told them."""
    agents = ["metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port"]
    return {"num_cpus": cpus, "object_store_memory": STORE, **{name: free_port() for name in agents}}


def free_port(given=set()):  # noqa: B006
    """A free port below those that the kernel gives to others."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as at, contextlib.suppress(OSError):
            at.bind(("", port))
            if port not in given:
                given.add(port)
                return port


ray._private.services.get_node = patient
# A shell that starts this in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": True, "dashboard_port": 0, **node(1)})
nodes = [cluster.add_node(**node(2)) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=True)
say(f"Ray {ray.__version__}: three nodes")

stop = SCRATCH / "stop"
result = fit("long", train, str(stop), workers=2, settings={"name": "line"})
until("steps", lambda: steps("long") > 20)
placed = actors("line ")
assert set(placed) == {"line server 0", "line server 1", "line server 2", "line worker 0", "line worker 1"}, placed
assert len({placed[f"line server {n}"].node_id for n in range(3)}) == 3, "servers share a node"
say("three servers on three nodes, two workers; they train")

page = until("the page", lambda: actors("http://"))
address = next(iter(page))
assert b"paraft" in urllib.request.urlopen(address.split("#")[0]).read().lower()
say("Ray's list of actors has the address of the live page")

old = (SCRATCH / "long" / "addresses" / "server-0").read_text()
os.kill(placed["line server 0"].pid, signal.SIGKILL)
until("server 0", lambda: (SCRATCH / "long" / "addresses" / "server-0").read_text() != old)
servers_up("long")
steps_on("long")
say("a server's actor is killed: Ray starts it again, it returns to the fleet")

os.kill(placed["line worker 1"].pid, signal.SIGKILL)
again = until("worker 1", lambda: [a for name, a in actors("line worker 1").items() if a.pid != placed[name].pid])
assert int(again[0].num_restarts) == 1, again
steps_on("long")
say("a worker's actor is killed: Ray starts it again, and the job goes on")

# A node whose raylet is killed, with all that runs there; a new one has room.
lost = next(n for n in nodes if n.node_id == placed["line server 1"].node_id or n.node_id == placed["line server 2"].node_id)
gone = next(name for name in ("line server 1", "line server 2") if placed[name].node_id == lost.node_id)
cluster.add_node(**node(2))
cluster.remove_node(lost, allow_graceful=False)
until("another node for " + gone, lambda: actors(gone).get(gone) and actors(gone)[gone].node_id != lost.node_id)
servers_up("long")
steps_on("long")
say("a node is killed: its processes start on another one, the server with its data")

stop.touch()
ended = result()
assert not isinstance(ended, Exception), ended
assert ended.path == SCRATCH / "long" and ended.metrics["final_loss"] < 0.01, ended
again = paraft.ray.fit(train, str(stop), run_dir=SCRATCH / "long", settings={"name": "line"})
assert again.metrics["final_loss"] == ended.metrics["final_loss"], again
say(f"the job has ended with a loss of {ended.metrics['final_loss']:.1e}; the same call again trains nothing")

failed = fit("fails", fails)()
assert isinstance(failed, paraft.ParaftError) and "nothing adds up" in str(failed), repr(failed)
until("its actors to end", lambda: not actors("fails"))
say("a function that raises ends all, and its error is raised by the call")

script = SCRATCH / "script.sh"
script.write_text('#!/bin/sh\necho "$RANK of $WORLD_SIZE: $1" >"$PARAFT_RUN_DIR/told-$RANK"\n')
script.chmod(0o755)
paraft.ray.fit(script, "a word", servers=1, page=None, run_dir=SCRATCH / "script")
assert [(SCRATCH / "script" / f"told-{n}").read_text() for n in (0, 1)] == ["0 of 2: a word\n", "1 of 2: a word\n"]
say("a script with its arguments")
until("all processors to be given back", lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])

if importlib.util.find_spec("torch"):
    example = Path(__file__).resolve().parents[3] / "python" / "examples" / "ray_line.py"
    there = {**os.environ, "RAY_ADDRESS": cluster.address}
    told = subprocess.run([sys.executable, example, SCRATCH / "example"], env=there, capture_output=True, text=True)
    # Lines of the actors may follow.
    loss = re.search(r"^loss ([\d.]+)$", told.stdout, re.M)
    assert told.returncode == 0 and loss and float(loss[1]) < 0.01, told.stdout + told.stderr
    say(f"the example of the page, a driver of its own: {loss[0]}")


def interrupt():
    until("steps", lambda: steps("interrupted") > 100)
    os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=interrupt, daemon=True).start()
stop = SCRATCH / "stop-interrupted"
call = {"settings": {"train.mode": "asp"}, "run_dir": SCRATCH / "interrupted"}
try:
    paraft.ray.fit(train, str(stop), **call)
except KeyboardInterrupt:
    trained = steps("interrupted")
else:
    raise AssertionError("it is not interrupted")
threading.Thread(target=lambda: (steps_on("interrupted"), stop.touch()), daemon=True).start()
ended = paraft.ray.fit(train, str(stop), **call)
assert ended.metrics["steps"] > trained > 100 and ended.metrics["mode"] == "asp", ended
begun = next(event for event in record("interrupted") if event["event"] == "run").get("resumed_step", 0)
assert 0 < begun <= trained, begun
say(f"after Ctrl-C at step {trained} the same call continues from step {begun}")
ray.shutdown()
cluster.shutdown()
