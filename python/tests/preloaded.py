"""Imports torch once, and forks a process for each request of ``conftest``: an import takes seconds of CPU time, and the tests start
hundreds of workers.

Requests and answers are lines of JSON on standard input and output. A request with ``call`` starts a process, and the answer is its
number; one with ``poll`` asks for the exit code of a process, which is null while it runs.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
from typing import Any


def run(request: dict[str, Any]) -> None:
    """The forked process: what ``python -c`` would do with this call."""
    for fd, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY | os.O_CREAT),
        (2, request["err"], os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    random.seed()
    module, function, args = request["call"]
    sys.argv, sys.path[0] = ["-c", module, function, args], ""
    value = getattr(importlib.import_module(module), function)(*json.loads(args))
    print("\n" + json.dumps(value))


def main() -> None:
    import torch._dynamo
    import torch.distributed  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests decide who gets Ctrl-C
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                return run(request)  # and ends as any process does
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
