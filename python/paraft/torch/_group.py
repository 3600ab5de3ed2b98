"""Several processes of a host as one worker: torch's process group averages the gradients inside, and one rank speaks
with the servers.

The ranks share the weights' memory: the first rank pulls into it, and each takes its part of the model (all of it, or
with FSDP2 its shard). No rank reads there during a step's wait, because all ranks meet before it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import platform
import time
import torch
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.distributed as dist

from .. import errors
from ..errors import ConfigError, MisuseError, ParaftError

#: Bytes for the message of the first rank to the others after each step.
_TOLD_BYTES = 4096
#: Bytes of an error's message, each of which JSON may encode in six.
_TOLD_CHARACTERS = 512
#: Time for the backend's threads at the end: they need microseconds.
_SETTLE_SECONDS = 1.0

#: A worker's state after a step, as in the extension.
StepState = tuple[int, bool, bool]


class Group:
    """A worker of several ranks.

    Attributes:
        ranks: torch's global ranks, in order; the first speaks with the servers.
        leads: whether this process is the first rank.
        place_inside: this process's index among the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if torch.device("cpu") not in group._device_types:
            raise ConfigError(
                "the ranks of a group meet on the CPU, and its backend has none: "
                "dist.init_process_group(\"cpu:gloo,cuda:nccl\"), or dist.new_group(backend=\"gloo\")"
            )
        self._group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.place_inside = self.ranks.index(dist.get_rank())
        self.leads = self.place_inside == 0
        self._word = torch.zeros(_TOLD_BYTES, dtype=torch.uint8, device="cpu")
        self._mark = torch.zeros(1, dtype=torch.float32, device="cpu")

    def place(self) -> tuple[int, int]:
        """This worker's rank and the number of workers, if all groups have the same size and consecutive ranks.

        Raises:
            ConfigError: they do not.
        """
        size, world = len(self.ranks), dist.get_world_size()
        first = self.ranks[0]
        if world % size or first % size or self.ranks != list(range(first, first + size)):
            raise ConfigError(
                f"ranks {self.ranks} of {world} are not one of equal groups of consecutive ranks: say which worker this group is, "
                "and how many there are, with rank= and workers="
            )
        return first // size, world // size

    def memory(self, length: int) -> torch.Tensor:
        """Allocates zeroed ``float32`` values that all ranks share. All ranks call it.

        Raises:
            ConfigError: the ranks are on several hosts.
        """
        size = max(length * 4, 1)
        made: Optional[int] = None
        if self.leads:
            made = os.memfd_create("paraft-group")
            os.ftruncate(made, size)
        path, host = self.share((f"/proc/{os.getpid()}/fd/{made}", platform.node()))
        shared, why = None, ""
        try:
            descriptor = os.open(path, os.O_RDWR) if platform.node() == host else None
            if descriptor is None:
                why = f"rank {self.ranks[0]} is on host {host}"
            else:
                with open(descriptor, "rb"):  # closes the descriptor
                    shared = mmap.mmap(descriptor, size)
        except OSError as e:
            why = f"{e}; rank {self.ranks[0]} must be of the same user and container"
        failed = torch.tensor([0 if shared is not None else 1], device="cpu")
        dist.all_reduce(failed, group=self._group)  # wait until all ranks have it
        if made is not None:
            os.close(made)
        if shared is None or int(failed):
            raise ConfigError(
                f"the ranks of a group share memory, and {int(failed)} of {self.ranks} can't have that of the first"
                f"{': ' if why else ''}{why}. Make a group of each host's ranks: dist.new_group()"
            )
        return torch.frombuffer(shared, dtype=torch.float32, count=length)

    def meet(self) -> None:
        """Waits until all ranks are here."""
        dist.all_reduce(self._mark, group=self._group)

    def settle(self) -> None:
        """Waits until the backend's threads have released their last arguments. A release during Python's shutdown
        aborts the process (PyTorch #190489), and a script often ends right after its run."""
        count = getattr(torch.Tensor, "_use_count", lambda tensor: 1)
        until = time.monotonic() + _SETTLE_SECONDS
        while max(count(self._word), count(self._mark)) > 1 and time.monotonic() < until:
            time.sleep(0.0005)

    def open(self, join: Callable[[], Any]) -> Any:
        """Joins the job, and returns this rank's session object."""
        session = Member(self)
        session.lead(join)
        return session

    def tell(self, what: Optional[dict[str, Any]]) -> dict[str, Any]:
        """Sends the first rank's message to all.

        Raises:
            ParaftError: the first rank's error, on all ranks.
        """
        told = self._word.zero_()
        if what is not None:
            text = json.dumps(what).encode()
            told[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(told, self.ranks[0], group=self._group)
        said: dict[str, Any] = json.loads(bytes(told.tolist()).rstrip(b"\0"))
        if "error" in said and not self.leads:
            raise getattr(errors, said["error"])(f"rank {self.ranks[0]} of this group: {said['text']}")
        return said

    def share(self, what: Any) -> Any:
        """Sends an object of the first rank to all."""
        said = [what]
        dist.broadcast_object_list(said, self.ranks[0], group=self._group)
        return said[0]

    def sum(self, numbers: list[float]) -> list[float]:
        """The sum over the ranks, on the first one."""
        total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        dist.reduce(total, self.ranks[0], group=self._group)
        return total.tolist()


class Member:
    """A rank's part in a worker's session: the first rank speaks with the servers, and passes the answers to all. It
    has the methods of the extension's class that front ends call. All ranks must call the waiting ones."""

    def __init__(self, group: Group) -> None:
        self._of = group
        self._session: Any = None
        self._told: dict[str, Any] = {}

    def lead(self, join: Callable[[], Any]) -> None:
        """Joins, on the first rank."""

        def joined() -> StepState:
            self._session = join()
            return 0, False, False

        self._share(joined)

    def _share(self, act: Callable[[], StepState]) -> StepState:
        self._of.meet()  # all gradients are handed over, and no rank reads the weights
        if self._of.leads:
            try:
                step, moved, over = act()
            except ParaftError as e:
                self._of.tell({"error": type(e).__name__, "text": str(e)[:_TOLD_CHARACTERS]})
                raise
            told: Optional[dict[str, Any]] = {**self._session.status(), "moved": moved, "ended": over}
        else:
            told = None
        self._told = self._of.tell(told)
        moved, over = self._told.pop("moved"), self._told.pop("ended")
        return self._told["step"], moved, over

    def step(self, gradients: list[tuple[int, int]], loss: float, samples: int) -> StepState:
        """The first rank pushes, waits and pulls; then all ranks have the weights."""
        return self._share(lambda: self._session.step(gradients, loss, samples * len(self._of.ranks)))

    def chunk(self) -> Optional[tuple[int, list[int]]]:
        """The first rank's chunk, on all ranks."""
        chunk: Optional[tuple[int, list[int]]] = self._of.share(self._session.chunk() if self._of.leads else None)
        return chunk

    def prepared(self) -> None:
        """On the first rank."""
        if self._of.leads:
            self._session.prepared()

    def continue_wait(self) -> StepState:
        """Continues a step's wait that was interrupted on this rank; the other ranks are still in it."""
        return self._share(lambda: self._session.continue_wait())

    def save(self, folder: Optional[str] = None) -> str:
        """Only on the first rank: the other ranks wait for it in their next step.

        Raises:
            MisuseError: this is another rank.
        """
        if not self._of.leads:
            raise MisuseError(
                f"rank {self._of.ranks[0]} speaks with the servers for this group: it alone saves, and asks for the optimizer's state "
                f"(if dist.get_rank() == {self._of.ranks[0]})"
            )
        saved: str = self._session.save(folder)
        return saved

    def finish(self) -> None:
        """Waits until the loops of all workers have ended."""

        def finished() -> StepState:
            self._session.finish()
            return self._session.status()["step"], False, True

        self._share(finished)
        self._of.settle()

    def report(self, epoch: int, loss_sum: float, correct: int, count: int) -> None:
        """Reports the sum of the ranks' shares."""
        loss_sum, *whole = self._of.sum([loss_sum, correct, count])
        if self._of.leads:
            self._session.report(epoch, loss_sum, *map(int, whole))

    def moved(self) -> bool:
        """With local steps: whether the first rank's weights differ from the servers'."""
        moved: bool = self._of.share(self._session.moved() if self._of.leads else None)
        return moved

    def log(self, name: str, value: float) -> None:
        """Records the first rank's value."""
        if self._of.leads:
            self._session.log(name, value)

    def options(self, of_groups: list[tuple[float, dict[str, float]]]) -> None:
        """Uses the first rank's options."""
        if self._of.leads:
            self._session.options(of_groups)

    def clip_steps(self, clips: bool) -> None:
        """Every rank clips alike."""
        if self._of.leads:
            self._session.clip_steps(clips)

    def norm(self, gradients: list[tuple[int, int]], bound: Optional[float] = None) -> float:
        """The first rank receives the norm and shares it with all ranks."""
        norm = math.nan

        def asked() -> StepState:
            nonlocal norm
            norm = self._session.norm(gradients, bound)
            now = self._session.status()
            return now["step"], False, now["over"]

        self._share(asked)
        return float(self._of.share(norm))

    def skip(self) -> None:
        """A group's GradScaler finds the same on all ranks."""
        if self._of.leads:
            self._session.skip()

    def status(self) -> dict[str, Any]:
        """The state of the last step."""
        return dict(self._told)

    def leave(self) -> None:
        """Leaves the job, if this rank joined it."""
        if self._session is not None:
            self._session.leave()

