"""Runs a script whose rank 1 is killed behind its 20th step; rank 0 waits behind its 25th until the other is back.

    paraft launch --set cluster.max_restarts=1 dying.py FOLDER script.py ...
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_pre_hook

folder, *sys.argv = sys.argv[1:]
died, back = Path(folder, "died"), Path(folder, "back")
first = os.environ["RANK"] == "0"
steps = 0


def before_step(*_):
    """Runs before the steps of every optimizer."""
    global steps
    steps += 1
    if first and steps == 26:
        until = time.monotonic() + 60
        while not back.exists() and time.monotonic() < until:
            time.sleep(0.02)
    elif not first and died.exists():
        back.touch()
    elif not first and steps == 21:
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_pre_hook(before_step)
runpy.run_path(sys.argv[0], run_name="__main__")
