"""Several processes of a host as one worker: torch's own process group averages the gradients inside, and one rank speaks with the servers.

The weights lie in memory that the ranks share: the first one pulls into it, and each takes what it has of the model (all of it, or with
FSDP2 its shard). Nobody reads there while a step waits, since all have come to it before.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import time
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.distributed as dist

from .. import errors
from ..errors import ConfigError, MisuseError, ParaftError

#: What the rank that speaks with the servers tells the others after each step goes into so many bytes.
_TOLD_BYTES = 4096
#: Of an error's message, each of which JSON may write in six bytes.
_TOLD_CHARACTERS = 512
#: For the backend's threads, at the end: they need microseconds.
_SETTLE_SECONDS = 1.0

#: Where a worker stands after a step: as the extension has it.
Stands = tuple[int, bool, bool]


class Group:
    """A worker of several ranks.

    Attributes:
        ranks: torch's global ranks, in order; the first speaks with the servers.
        leads: whether this process is that one.
        place_inside: of this process among them.
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
        """Which worker this is, and how many there are, where all groups have the same size and consecutive ranks.

        Raises:
            ConfigError: they are not so.
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
        """So many ``float32``, zeros, that all ranks have in common. All call.

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
                with open(descriptor, "rb"):  # closes it
                    shared = mmap.mmap(descriptor, size)
        except OSError as e:
            why = f"{e}; rank {self.ranks[0]} must be of the same user and container"
        failed = torch.tensor([0 if shared is not None else 1], device="cpu")
        dist.all_reduce(failed, group=self._group)  # until all have it
        if made is not None:
            os.close(made)
        if shared is None or int(failed):
            raise ConfigError(
                f"the ranks of a group share memory, and {int(failed)} of {self.ranks} can't have that of the first"
                f"{': ' if why else ''}{why}. Make a group of each host's ranks: dist.new_group()"
            )
        return torch.frombuffer(shared, dtype=torch.float32, count=length)

    def meet(self) -> None:
        """Until all ranks are here."""
        dist.all_reduce(self._mark, group=self._group)

    def settle(self) -> None:
        """Until the backend's threads have let go of what they were given last. One that does so while Python ends aborts the process
        (PyTorch #190489), and a script often ends right after its run."""
        count = getattr(torch.Tensor, "_use_count", lambda tensor: 1)
        until = time.monotonic() + _SETTLE_SECONDS
        while max(count(self._word), count(self._mark)) > 1 and time.monotonic() < until:
            time.sleep(0.0005)

    def open(self, join: Callable[[], Any]) -> Any:
        """Joins the job, and gives what stands for the session on this rank."""
        session = Member(self)
        session.lead(join)
        return session

    def tell(self, what: Optional[dict[str, Any]]) -> dict[str, Any]:
        """The first rank's word to all.

        Raises:
            ParaftError: the first rank's, on all.
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
        """An object of the first rank's, on all."""
        said = [what]
        dist.broadcast_object_list(said, self.ranks[0], group=self._group)
        return said[0]

    def sum(self, numbers: list[float]) -> list[float]:
        """Over the ranks, on the first one."""
        total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        dist.reduce(total, self.ranks[0], group=self._group)
        return total.tolist()


class Member:
    """A rank's place in a worker's session: what the servers are told comes from the first, what they answer goes to all. Has the methods
    of the extension's class that a front end calls. Whatever waits, all ranks call."""

    def __init__(self, group: Group) -> None:
        self._of = group
        self._session: Any = None
        self._told: dict[str, Any] = {}

    def lead(self, join: Callable[[], Any]) -> None:
        """Joins, on the first rank."""

        def joined() -> Stands:
            self._session = join()
            return 0, False, False

        self._share(joined)

    def _share(self, act: Callable[[], Stands]) -> Stands:
        self._of.meet()  # what they hand over is there, and nobody reads the weights
        if self._of.leads:
            try:
                step, moved, over = act()
            except ParaftError as e:
                self._of.tell({"error": type(e).__name__, "text": str(e)[:_TOLD_CHARACTERS]})
                raise
            told: Optional[dict[str, Any]] = {**self._session.stands(), "moved": moved, "ended": over}
        else:
            told = None
        self._told = self._of.tell(told)
        moved, over = self._told.pop("moved"), self._told.pop("ended")
        return self._told["step"], moved, over

    def step(self, gradients: list[tuple[int, int]], loss: float, samples: int) -> Stands:
        """The first rank pushes, waits and pulls; all have the weights then."""
        return self._share(lambda: self._session.step(gradients, loss, samples * len(self._of.ranks)))

    def chunk(self) -> Optional[tuple[int, list[int]]]:
        """What the first rank is given, for all."""
        chunk: Optional[tuple[int, list[int]]] = self._of.share(self._session.chunk() if self._of.leads else None)
        return chunk

    def prepared(self) -> None:
        """On the first rank."""
        if self._of.leads:
            self._session.prepared()

    def go_on(self) -> Stands:
        """Ends the wait of a step that was interrupted on this rank; others are in it."""
        return self._share(lambda: self._session.go_on())

    def save(self, folder: Optional[str] = None) -> str:
        """The first rank's alone: the others come to it with their next step.

        Raises:
            MisuseError: this is another.
        """
        if not self._of.leads:
            raise MisuseError(
                f"rank {self._of.ranks[0]} speaks with the servers for this group: it alone saves, and asks for the optimizer's state "
                f"(if dist.get_rank() == {self._of.ranks[0]})"
            )
        saved: str = self._session.save(folder)
        return saved

    def finish(self) -> None:
        """All workers' loops have ended."""

        def finished() -> Stands:
            self._session.finish()
            return self._session.stands()["step"], False, True

        self._share(finished)
        self._of.settle()

    def report(self, epoch: int, loss_sum: float, correct: int, count: int) -> None:
        """The ranks' shares are added up."""
        loss_sum, *whole = self._of.sum([loss_sum, correct, count])
        if self._of.leads:
            self._session.report(epoch, loss_sum, *map(int, whole))

    def moved(self) -> bool:
        """Whether the first rank's weights aren't the servers' any more, with local steps."""
        moved: bool = self._of.share(self._session.moved() if self._of.leads else None)
        return moved

    def rates(self, rates: list[float]) -> None:
        """Those of the first rank count."""
        if self._of.leads:
            self._session.rates(rates)

    def skip(self) -> None:
        """A GradScaler of a group finds the same on all ranks."""
        if self._of.leads:
            self._session.skip()

    def stands(self) -> dict[str, Any]:
        """As of the last step."""
        return dict(self._told)

    def leave(self) -> None:
        """Leaves the job, where this is the rank that joined it."""
        if self._session is not None:
            self._session.leave()

