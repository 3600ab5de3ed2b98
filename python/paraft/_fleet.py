"""Servers as processes of this machine, for a notebook, a test or a first try."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Optional

from .errors import ConfigError, UnavailableError


def program() -> str:
    """The path of the ``paraft`` binary: this package's, otherwise the one on ``PATH``; ``PARAFT_PROGRAM`` overrides
    it."""
    import sysconfig  # half a millisecond, which `import paraft` need not take

    own = os.path.join(sysconfig.get_path("scripts"), "paraft")
    found = os.environ.get("PARAFT_PROGRAM") or (own if os.access(own, os.X_OK) else shutil.which("paraft"))
    if not found:
        raise ConfigError("the program `paraft` is neither beside this Python nor in the PATH; set PARAFT_PROGRAM to where it is")
    return found


class Fleet:
    """Servers on this machine, as :func:`local` starts them. They end with this process, with :meth:`close`, or with the ``with`` block."""

    def __init__(self, servers: int = 3, *, durability: str = "quorum-memory", shards: Optional[int] = None) -> None:
        if servers < 1:
            raise ConfigError(f"{servers} servers; a fleet has at least one")
        self.servers: list[str] = []
        self.shards = shards or min(servers, 8)
        self.replicas = min(3, servers if servers % 2 else servers - 1) or 1
        self.durability = durability
        #: The folder of its certificates; None: plain text (``PARAFT_INSECURE``).
        self.certs: Optional[str] = None
        self._folder = tempfile.TemporaryDirectory(prefix="paraft-fleet-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._owner = os.getpid()
        #: Whether a job was trained to its end: the servers accept only one.
        self._trained = False
        try:
            self._start(servers)
        except BaseException:
            self.close()
            raise

    def _start(self, servers: int) -> None:
        if not os.environ.get("PARAFT_INSECURE"):
            self.certs = os.path.join(self._folder.name, "certs")
            made = subprocess.run([program(), "certs", "new", self.certs], capture_output=True, text=True)
            if made.returncode:
                raise UnavailableError(f"no certificates for the servers: {made.stderr.strip()}")
        for i in range(servers):
            command = [program(), "server", "--supervised", "--listen", "127.0.0.1:0", "--id", str(i)]
            command += ["--shards", str(self.shards), "--replicas", str(self.replicas), "--durability", self.durability]
            command += ["--data", os.path.join(self._folder.name, f"server-{i}"), "--log-file", self._log(i)]
            command += ["--certs", self.certs] if self.certs else []
            # Not in our process group: Ctrl-C is for the script, and the servers must outlive its leave.
            with open(self._log(i) + ".err", "wb") as err:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, start_new_session=True
                )
            self._processes.append(process)
        for i, process in enumerate(self._processes):
            assert process.stdout is not None
            address = process.stdout.readline().decode().strip()
            if not address:
                raise UnavailableError(f"server {i} did not start: {self._why(i)}")
            self.servers.append(address)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write((",".join(self.servers) + "\n").encode())
            process.stdin.flush()

    def _log(self, i: int) -> str:
        return os.path.join(self._folder.name, f"server-{i}.log")

    def _why(self, i: int) -> str:
        self._processes[i].wait(5)
        with open(self._log(i) + ".err", errors="replace") as said:
            return said.read().strip() or f"it exited with {self._processes[i].returncode}"

    def settings(self) -> list[str]:
        """The settings with which a job uses these servers, for ``--set``."""
        return [
            f"cluster.servers={len(self.servers)}",
            f"cluster.shards={self.shards}",
            f"cluster.replicas={self.replicas}",
            f'cluster.durability="{self.durability}"',
        ]

    def close(self) -> None:
        """Ends the servers. Their state is lost."""
        if os.getpid() != self._owner:
            return
        processes, self._processes = self._processes, []
        for process in processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()  # a supervised server ends when its standard input closes
        for process in processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], e: Optional[BaseException], at: Optional[TracebackType]
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_processes", None) and not sys.is_finalizing():
            self.close()

    def __repr__(self) -> str:
        return f"<paraft.Fleet of {len(self.servers)} servers: {', '.join(self.servers)}>"


def local(servers: int = 3, *, durability: str = "quorum-memory", shards: Optional[int] = None) -> Fleet:
    """Starts a fleet of ``servers`` processes on this machine, for :func:`paraft.init`.

    Args:
        servers: how many; of three, one may be lost.
        durability: what an acknowledged push survives: ``quorum-memory``, ``quorum-disk`` or ``leader``.
        shards: Raft groups that share the model, 1 to 64. Default: as many as servers, 8 at most.

    Raises:
        ConfigError: the ``paraft`` program is not found, or the settings are invalid.
        UnavailableError: a server did not start; the message has its output.
    """
    return Fleet(servers, durability=durability, shards=shards)
