"""Clipping behind ``backward()`` where the servers run the optimizer. In ``bsp`` they clip the mean gradient by the script's
bound, as ``clip_grad_norm_()`` does under DDP; in other modes each worker clips its own gradient before its push."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Optional

import torch

from ..errors import DivergedError, MisuseError
from ._clip_calls import Call

if TYPE_CHECKING:
    from ._steps import OnServers

SCALED = (
    "clip_grad_norm_() or clip_grad_value_() came before scaler.unscale_(optimizer), so that it has clipped gradients that are multiplied by the "
    "GradScaler's scale: call scaler.unscale_(optimizer) before it"
)
_MEAN = "prepare(..., apply=\"mean\") allows it in mode bsp"
_LEFT_OUT = (
    "clip_grad_norm_() has pushed the gradients of a step, and optimizer.step() did not follow before other gradients were computed, changed or "
    f"clipped: the other workers wait for it. To leave steps out, {_MEAN}"
)

#: What changes when a gradient does, or is another: its writes, and itself, because memory that zero_grad() has freed is used again.
Mark = Optional[tuple[int, "weakref.ref[torch.Tensor]"]]


def _mark(gradient: Optional[torch.Tensor]) -> Mark:
    return None if gradient is None else (gradient._version, weakref.ref(gradient))


def marks(gradients: list[Optional[torch.Tensor]]) -> list[Mark]:
    """The gradients' marks, of now."""
    return list(map(_mark, gradients))


def are_as(gradients: list[Optional[torch.Tensor]], marked: list[Mark]) -> bool:
    """Whether gradients are as they were marked."""
    return len(gradients) == len(marked) and all(map(_is_as, gradients, marked))


def _is_as(gradient: Optional[torch.Tensor], mark: Mark) -> bool:
    """Whether a gradient is as it was marked."""
    if gradient is None or mark is None:
        return gradient is None and mark is None
    return mark[0] == gradient._version and mark[1]() is gradient


#: The optimizers of a step, of several ones; None: there is one.
Turn = Optional["frozenset[int]"]


def each_of(turn: Turn) -> list[Optional[int]]:
    """The optimizers of a step; a single one is None."""
    return [None] if turn is None else [*sorted(turn)]


class Clipping:
    """What a script clips in a step. Of several optimizers each has its own bounds; a single one is ``None``.

    If it clips one and then another before it steps the first, the servers make the first step when the second is clipped:
    its own ``step()`` has nothing left to do. If one call clips several together, they are one step, made by the first ``step()``.
    """

    def __init__(self, front: OnServers) -> None:
        self._of = weakref.ref(front)
        #: Gradients are pushed as those of clipped steps, whose rounds wait for the norm.
        self.by_norm = False
        #: The marks of the gradients that a clip_grad_norm_() of this step has handed over, and which of several optimizers they are of.
        self.handed: Optional[list[Mark]] = None
        self.turn: Turn = None
        #: The optimizers whose step is made before their step() is called: the marks of their gradients, whether the other workers
        #: have made it too, and what step() raises.
        self._ahead: dict[int, tuple[list[Mark], bool, Optional[DivergedError]]] = {}
        #: The norm of their mean, and by how much the script has scaled it.
        self._norm, self._factor = math.nan, 1.0
        #: The bounds on values that the servers know, and for which optimizers the script has given them in this step.
        self.values: dict[Optional[int], float] = {}
        self._said: set[Optional[int]] = set()
        #: The marks of the gradients that were stepped; before the first call of one of each optimizer, which costs little.
        self._stepped: Optional[list[Mark]] = None
        self._samples: dict[int, Mark] = {}
        #: The optimizers whose gradients a GradScaler has unscaled in this step.
        self.unscaled: set[Optional[int]] = set()

    @property
    def _front(self) -> OnServers:
        front = self._of()
        assert front is not None
        return front

    @property
    def _else(self) -> str:
        return "for several optimizers nothing else does it" if self._front._parts else _MEAN

    def _gradients(self) -> list[Optional[torch.Tensor]]:
        return [p.grad for p in self._front.flat.params]

    def clips(self, call: Call) -> Optional[tuple[Any]]:
        """The script clips, or asks for a norm. Returns what the call returns; None: torch does it.

        Raises:
            MisuseError: the servers cannot do it.
        """
        front = self._front
        run, now = front.run, self._gradients()
        given = set(map(id, call.tensors))
        its = {i for i, p in front._params if id(now[i] if call.gradients else p) in given and now[i] is not None}
        first = self._stepped is None
        stepped = self._stepped = self._stepped or [None] * len(now)
        known = self._samples if first and its & self._samples.keys() else dict(enumerate(stepped))
        fresh = any(not _is_as(now[i], known[i]) for i in its & known.keys())
        for of in list(self._ahead):
            if front._parts[of][0] & its and self._is_ahead(of):
                raise MisuseError(f"{call.name}() behind a clip of another optimizer, which has made this one's step: clip each at once, then step")
        if run._quiet or run._finished or run._waits or not fresh:
            return None
        if run.mode != "bsp":
            return self._by_worker(call, its)
        turn = self._whole(call, its, {i for i, g in enumerate(now) if g is not None})
        if self.handed is not None and self.is_changed():
            self.left_out()
        if self.handed is not None and self.turn != turn:
            self._step_ahead(turn)
        if call.name == "clip_grad_value_":
            return self._by_value(turn, call.number("clip_value"))
        if call.name == "clip_grads_with_norm_":
            norm = self._norm * self._factor
            if self.handed is None or abs(call.number("total_norm") - norm) > 1e-6 * abs(norm):
                raise MisuseError(f"clip_grads_with_norm_() with another norm than the last get_total_norm()'s: {self._else}")
            self._ask(call, turn, call.number("max_norm"))
            return (None,)
        if call.number("norm_type") != 2.0:
            raise MisuseError(f"{call.name}(norm_type={call.number('norm_type'):g}): the servers clip by the norm of type 2; {self._else}")
        norm = self._ask(call, turn, call.number("max_norm") if call.name == "clip_grad_norm_" else None)
        if call.must_be_finite and not math.isfinite(norm):
            raise RuntimeError(f"the norm of the mean gradient is {norm}, so that it cannot be clipped (error_if_nonfinite=True)")
        return (torch.tensor(norm, dtype=torch.float32, device=front.flat.params[0].device),)

    def unscales(self, of: Optional[int]) -> None:
        """A GradScaler unscales an optimizer's gradients.

        Raises:
            MisuseError: they are clipped already.
        """
        handed = self.handed is not None and of in each_of(self.turn) and not self.is_changed()
        if handed or of in self._said or of is not None and self._is_ahead(of):
            raise MisuseError(SCALED)
        self.unscaled.add(of)

    def _by_worker(self, call: Call, its: set[int]) -> Optional[tuple[Any]]:
        """This worker clips its own gradient: torch does it, except for the rows of tables."""
        front = self._front
        front.push_late(f"{call.name}() changes this worker's own gradients in this mode")
        front._pushed.clear()
        if not front.tables.all:
            return None
        if call.name != "clip_grad_norm_":
            raise MisuseError(
                f"{call.name}() would leave out the rows of table `{front.tables.all[0].name}`, which are no parameters: clip_grad_norm_() counts them in"
            )
        turn = [of for of, (part, _) in enumerate(front._parts) if part & its] if front._parts else None
        own = [g for i in its if (g := front.flat.params[i].grad) is not None]
        bound, kind = call.number("max_norm"), call.number("norm_type")
        return (front.tables.clip(front.tables.of(turn), own, bound, kind, call.must_be_finite),)

    def _whole(self, call: Call, its: set[int], have: set[int]) -> Turn:
        """The optimizers, of several, whose gradients these are.

        Raises:
            MisuseError: gradients of one are missing.
        """
        front = self._front
        parts = [part for part, _ in front._parts]
        turn = frozenset(of for of, part in enumerate(parts) if part & its)
        missing = have - its if not parts else have.intersection(*[set().union(*(parts[of] for of in turn))]) - its
        if missing:
            name = front.flat.names[min(missing)]
            raise MisuseError(f"{call.name}() of some parameters, without `{name}`: the servers clip the whole gradient of an optimizer; {self._else}")
        return turn if parts else None

    def _by_value(self, turn: Turn, value: float) -> tuple[None]:
        front = self._front
        if self.handed is not None:
            raise MisuseError(f"clip_grad_value_() behind clip_grad_norm_(): the gradients are pushed already; {self._else}")
        if not value > 0:
            raise MisuseError(f"clip_grad_value_({value:g}): the servers clip to a value above 0; {self._else}")
        for of in each_of(turn):
            bound = min(value, self.values[of]) if of in self._said else value
            if front.is_early and bound != self.values.get(of):
                raise MisuseError(f"clip_grad_value_() is new in this step, whose gradients are pushed already: prepare(..., overlap=False), or {_MEAN}")
            self.values[of] = bound
            self._said.add(of)
        return (None,)

    def _ask(self, call: Call, turn: Turn, bound: Optional[float]) -> float:
        """Pushes the step's gradients, waits for the norm of their mean, and returns it as it is after earlier calls."""
        front = self._front
        if bound is not None and not bound > 0:
            raise MisuseError(f"{call.name}(max_norm={bound:g}): the servers clip to a norm above 0; {self._else}")
        gradients: list[tuple[int, int]] = []
        if self.handed is None:
            if not self._said.isdisjoint(each_of(turn)):
                raise MisuseError(f"clip_grad_norm_() behind clip_grad_value_(): the servers clip by norm first; {self._else}")
            if front.clips_by_setting:
                raise MisuseError("the script clips, and the servers too: prepare() without clip_norm and clip_value")
            if front.is_early and not self.by_norm:
                raise MisuseError(f"clip_grad_norm_() is new in this step, whose gradients are pushed already: prepare(..., overlap=False), or {_MEAN}")
            if not self.by_norm:
                front._session.clip_steps(True)
                self.by_norm = True
            front.run._joined()
            self._forget_values(turn)
            own = [g for i in self._steps_with(turn) if (g := front.flat.params[i].grad) is not None]
            scaled = not self.unscaled.isdisjoint(each_of(turn))
            tables = front.tables.of(turn)
            skips = scaled and not (all(bool(g.isfinite().all()) for g in own) and front.tables.are_finite(tables))
            gradients = front.hand_over(turn, scaled=scaled, skips=skips)
            front.tables.hand_over(front._session, tables)
            self.handed, self.turn, self._factor = marks(self._gradients()), turn, 1.0
            self._norm = front.run._asked(lambda session: session.norm(gradients, None))
            # Where all workers skip the step, because one has an infinity, the servers' norm is of nothing.
            if skips or self._norm == 0.0 and front.run.workers > 1 and any(bool(g.any()) for g in own):
                self._norm = math.nan
        norm = self._norm * self._factor
        if bound is not None and bound < norm + 1e-6:
            self._factor *= bound / (norm + 1e-6)
            # What all calls together do, as one bound on the norm of the mean.
            front.run._asked(lambda session: session.norm([], self._factor * (self._norm + 1e-6)))
        return norm

    def is_changed(self) -> bool:
        """Whether gradients are others than those that were handed over."""
        if self.handed is None:
            return False
        now, tables = self._gradients(), self._front.tables
        return tables.gave(tables.of(self.turn)) or not all(_is_as(now[i], self.handed[i]) for i in self._steps_with(self.turn))

    def _steps_with(self, turn: Turn) -> Iterable[int]:
        """The parameters that step."""
        front = self._front
        its = front._steps_with(turn)
        return range(len(front.flat.params)) if its is None else its

    def left_out(self) -> None:
        """Gradients came after those that were handed over, or were changed, and no step was made.

        Raises:
            MisuseError: the other workers make it.
        """
        if math.isfinite(self._norm):
            raise MisuseError(_LEFT_OUT)
        self.ends(self.turn)
        self._front._pushed.clear()
        try:
            self._front.run._finish_step([])
        except DivergedError:
            pass  # the step is skipped, as the script has decided

    def _step_ahead(self, turn: Turn) -> None:
        """Makes the step whose gradients are handed over: the script clips those of other optimizers before its ``step()``.

        Raises:
            MisuseError: the other optimizers are partly the same.
        """
        done = self.turn
        if done is None or turn is None or done & turn:
            raise MisuseError(f"clip_grad_norm_() of one optimizer alone, and of it together with another one, in the same step; {self._else}")
        refused: Optional[DivergedError] = None
        try:
            self._front.send(done, [], scaled=not self.unscaled.isdisjoint(done))
        except DivergedError as e:
            refused = e
        self.made(done, refused)

    def made(self, turn: Iterable[int], refused: Optional[DivergedError]) -> None:
        """The step of these optimizers is made, and their ``step()`` is still to be called."""
        for of in turn:
            gradients: list[Optional[torch.Tensor]] = [self._front.flat.params[i].grad for i in sorted(self._steps_with(frozenset([of])))]
            self._ahead[of] = marks(gradients), math.isfinite(self._norm), refused

    def _is_ahead(self, of: int) -> bool:
        """Whether an optimizer's step is made already.

        Raises:
            MisuseError: it is, and the gradients are other ones by now.
        """
        ahead = self._ahead.get(of)
        if ahead is None:
            return False
        if are_as([self._front.flat.params[i].grad for i in sorted(self._steps_with(frozenset([of])))], ahead[0]):
            return True
        del self._ahead[of]
        if ahead[1]:
            raise MisuseError(_LEFT_OUT)
        return False  # the script has skipped it, as all workers

    def is_made(self, of: Optional[int]) -> bool:
        """A step begins; whether it is made already.

        Raises:
            DivergedError: a gradient of it was not finite.
            MisuseError: it was, and other gradients were computed since.
        """
        if of is None or not self._is_ahead(of):
            return False
        _, _, refused = self._ahead.pop(of)
        if refused is not None:
            raise refused
        return True

    def steps(self, of: Optional[int]) -> bool:
        """A step begins; whether its gradients are handed over."""
        if self.is_changed():
            self.left_out()
        if self.handed is not None and of not in each_of(self.turn):
            self._step_ahead(frozenset() if of is None else frozenset([of]))
        if self.handed is None:
            self._forget_values(None if of is None else frozenset([of]))
        return self.handed is not None

    def _forget_values(self, turn: Turn) -> None:
        """The bounds on values of an earlier step are none of this step, unless the script has given them again."""
        for of in each_of(turn):
            if of in self.values and of not in self._said:
                if self._front.is_early:
                    raise MisuseError("clip_grad_value_() was not called in this step, and its gradients are pushed as if: prepare(..., overlap=False)")
                del self.values[of]

    def ends(self, turn: Turn) -> None:
        """The step's gradients are pushed."""
        self.handed = None
        self._said.difference_update(each_of(turn))
        self.unscaled.difference_update(each_of(turn))
        if self._stepped is None:
            sample = next((i for i in self._steps_with(turn) if self._front.flat.params[i].grad is not None), None)
            if sample is not None:
                self._samples[sample] = marks([self._front.flat.params[sample].grad])[0]
        else:
            now = marks(self._gradients())
            for i in self._steps_with(turn):
                self._stepped[i] = now[i]

    def values_by_class(self) -> list[Optional[float]]:
        """The bound on values of each of the servers' classes of groups."""
        front = self._front
        classes = range(max(front.flat.classes) + 1)
        if not front._parts:
            return [self.values.get(None) for _ in classes]
        of = {c: of for of, (_, others) in enumerate(front._parts) for c in classes if c not in others}
        return [self.values.get(of[c]) for c in classes]

    def follows(self) -> None:
        """The step is over: another mode may be in force."""
        front = self._front
        if self.by_norm and not front.run._finished and front.run.mode != "bsp":
            self.by_norm = False
            front._session.clip_steps(False)
            front.push_late("the mode was switched, and the script clips")
