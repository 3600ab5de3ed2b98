"""Parameter groups that a script freezes and unfreezes while it trains: a step leaves out those that are frozen then."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Optional

from .._paraft import digest
from ..errors import MisuseError
from ._flat import Flat


class Freezing:
    """The classes of groups that each step leaves out. All workers leave out the same ones: of what one leaves out, no
    worker's gradient is applied in a round."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        #: The classes that the present step leaves out; None before its first gradient.
        self._out: Optional[set[int]] = None
        #: Those of the last step, and those in it that the step before had left out.
        self._last: set[int] = set()
        self._begun: set[int] = set()
        #: A digest of a sample of each class from before the step, and the sample's number.
        self._digests, self._sample = [0], 0
        ends = list(itertools.accumulate(flat.class_values))
        at = flat.values.data_ptr()
        self._spans = [(at + 4 * begin, 4 * (end - begin)) for begin, end in zip([0, *ends], ends)]

    def begins(self, others: Iterable[int]) -> set[int]:
        """Begins a step, before its first gradient: the classes that it leaves out. ``others``: those of other optimizers, which
        do not step."""
        self._out = self._frozen() | set(others)
        return self._out

    def tells(self, session: Any) -> None:
        """Leaves them out. So begins each step of a job with several classes: whether another worker leaves out what this one
        does not is asked behind it."""
        if self._out is not None and (self._out or len(self._spans) > 1):
            self._sample += 1
            self._digests = digest(self._spans, self._sample)
            session.leave_out(sorted(self._out))

    def _frozen(self) -> set[int]:
        """The classes whose parameters are all frozen, and have no gradient of before, with which torch steps them."""
        flat = self._flat
        return {
            c
            for c, its in enumerate(flat.members)
            if not any(flat.params[i].requires_grad or flat.params[i].grad is not None for i in its)
        }

    def check(self) -> None:
        """Checks that the same groups are frozen as when the step's first gradient was pushed. (Then there are no other
        optimizers.)

        Raises:
            MisuseError: others are.
        """
        now = self._frozen()
        if self._out is not None and now != self._out:
            c = min(now ^ self._out)
            raise MisuseError(
                f"`{self._name(c)}` was {'frozen' if c in now else 'unfrozen'} between backward() and optimizer.step(), and gradients were pushed "
                "without it: do so behind the step, or prepare(..., overlap=False)"
            )

    def left_out(self) -> set[int]:
        """The parameters that the present step leaves out, by index."""
        return {i for c in self._out or () for i in self._flat.members[c]}

    def ends(self) -> None:
        """The step's gradients are pushed."""
        if self._out is not None:
            self._begun = self._last - self._out
            self._last, self._out = self._out, None

    def untrained(self) -> Optional[str]:
        """A parameter that the last step should have moved, and has not, though it has moved others. None: it has moved none,
        as where a worker skips a step."""
        own = [c for c in range(len(self._spans)) if c not in self._last]
        now = digest(self._spans, self._sample)
        still = sorted((c for c in own if now[c] == self._digests[c]), key=lambda c: c not in self._begun)
        return self._name(still[0]) if 0 < len(still) < len(own) else None

    def _name(self, c: int) -> str:
        return self._flat.names[self._flat.members[c][0]]
