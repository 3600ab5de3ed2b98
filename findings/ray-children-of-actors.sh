#!/usr/bin/env bash
# Which children of an actor Ray ends with it.
#
# Seen with ray 2.60.0 on Linux. Expected from memory: children of a killed actor live on. In fact each worker process leads a process
# group of its own, and
#   - if the actor is killed (SIGKILL), Ray ends its children and theirs; only one in a session of its own lives on;
#   - `ray.kill` ends that one too;
#   - if the node's raylet is killed, the actor ends, and all its children live on.
# What this means for us: the processes of a fleet would outlive a lost raylet and keep their data folders, so each is tied to its actor by
# PR_SET_PDEATHSIG (python/paraft/ray.py); one that Ray has started elsewhere then finds its folder free.
#
#   findings/ray-children-of-actors.sh         # PYTHON=... uses a Python that has ray 2.60.0 instead of installing it (0.3 GB)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z ${PYTHON:-} ]]; then
    python3 -m venv "$folder/venv"
    PYTHON=$folder/venv/bin/python
    "$PYTHON" -m pip install --quiet --disable-pip-version-check ray==2.60.0
fi
cd "$folder"
cat >children.py <<'PY'
import os
import signal
import subprocess
import time

import ray
from ray.cluster_utils import Cluster

assert ray.__version__ == "2.60.0", ray.__version__
STORE = 100 << 20
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE})
node = cluster.add_node(num_cpus=1, object_store_memory=STORE)
ray.init(address=cluster.address, log_to_driver=False)


@ray.remote(num_cpus=1, max_restarts=0)
class Actor:
    def children(self):
        kept = subprocess.PIPE
        shell = subprocess.Popen(["sh", "-c", "sleep 301 & echo $!; wait"], stdout=kept, text=True)
        own = subprocess.Popen(["sleep", "302"], start_new_session=True)
        return os.getpid(), {"child": shell.pid, "grandchild": int(shell.stdout.readline()), "own session": own.pid}


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def living(end):
    """Which children live on 5 s after the actor has gone."""
    actor = Actor.remote()
    pid, children = ray.get(actor.children.remote())
    end(actor, pid)
    until = time.monotonic() + 60
    while lives(pid):
        assert time.monotonic() < until, "the actor lives on"
        time.sleep(0.1)
    time.sleep(5)
    found = [name for name, child in children.items() if lives(child)]
    for child in filter(lives, children.values()):
        os.kill(child, signal.SIGKILL)
    return found


def kill_raylet(actor, pid):
    for raylet in node.all_processes["raylet"]:
        os.kill(raylet.process.pid, signal.SIGKILL)


seen = {
    "SIGKILL to the actor": living(lambda actor, pid: os.kill(pid, signal.SIGKILL)),
    "ray.kill": living(lambda actor, pid: ray.kill(actor)),
    "SIGKILL to the raylet": living(kill_raylet),
}
ray.shutdown()
cluster.shutdown()
for how, found in seen.items():
    print(f"{how:22} live on: {', '.join(found) or 'none'}")
expected = [["own session"], [], ["child", "grandchild", "own session"]]
assert list(seen.values()) == expected, "it has changed"
print("as seen with ray 2.60.0")
PY
"$PYTHON" children.py 2>"$folder/said" || { grep -v state-dump "$folder/said" | tail -n 20 >&2; exit 1; }
