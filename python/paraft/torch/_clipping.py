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

_MEAN = "prepare(..., apply=\"mean\") allows it in mode bsp"

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


class Clipping:
    """What a script clips in a step. Of several optimizers each has its own bounds; a single one is ``None``."""

    def __init__(self, front: OnServers) -> None:
        self._of = weakref.ref(front)
        #: Gradients are pushed as those of clipped steps, whose rounds wait for the norm.
        self.by_norm = False
        #: The marks of the gradients that a clip_grad_norm_() of this step has handed over, and which of several optimizers they are of.
        self.handed: Optional[list[Mark]] = None
        self.of: Optional[int] = None
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
        if run._quiet or run._finished or run._waits or not fresh:
            return None
        if run.mode != "bsp":
            self._by_worker(call)
            return None
        of = self._whole(call, its, {i for i, g in enumerate(now) if g is not None})
        if self.handed is not None and (self.of != of or self.is_changed()):
            self.left_out()
        if call.name == "clip_grad_value_":
            return self._by_value(of, call.number("clip_value"))
        if call.name == "clip_grads_with_norm_":
            norm = self._norm * self._factor
            if self.handed is None or abs(call.number("total_norm") - norm) > 1e-6 * abs(norm):
                raise MisuseError(f"clip_grads_with_norm_() with another norm than the last get_total_norm()'s: {self._else}")
            self._ask(call, of, call.number("max_norm"))
            return (None,)
        if call.number("norm_type") != 2.0:
            raise MisuseError(f"{call.name}(norm_type={call.number('norm_type'):g}): the servers clip by the norm of type 2; {self._else}")
        norm = self._ask(call, of, call.number("max_norm") if call.name == "clip_grad_norm_" else None)
        if call.must_be_finite and not math.isfinite(norm):
            raise RuntimeError(f"the norm of the mean gradient is {norm}, so that it cannot be clipped (error_if_nonfinite=True)")
        return (torch.tensor(norm, dtype=torch.float32, device=front.flat.params[0].device),)

    def _by_worker(self, call: Call) -> None:
        """This worker clips its own gradient."""
        front = self._front
        front.push_late(f"{call.name}() changes this worker's own gradients in this mode")
        front._pushed.clear()

    def _whole(self, call: Call, its: set[int], have: set[int]) -> Optional[int]:
        """The optimizer, of several, whose gradients these are.

        Raises:
            MisuseError: they are not all gradients of one.
        """
        front = self._front
        parts = [part for part, _ in front._parts]
        for of, part in enumerate(parts):
            if its == have & part:
                return of
        if not parts and its == have:
            return None
        if sum(bool(its & part) for part in parts) > 1:
            raise MisuseError(
                f"{call.name}() of the parameters of several optimizers: the servers clip the gradient of each by itself. Call it for each, and "
                "step that one before the next call"
            )
        of_one = next((have & part for part in parts if its & part), have)
        name = front.flat.names[min(of_one - its)]
        raise MisuseError(f"{call.name}() of some parameters, without `{name}`: the servers clip the whole gradient of an optimizer; {self._else}")

    def _by_value(self, of: Optional[int], value: float) -> tuple[None]:
        front = self._front
        if self.handed is not None:
            raise MisuseError(f"clip_grad_value_() behind clip_grad_norm_(): the gradients are pushed already; {self._else}")
        if not value > 0:
            raise MisuseError(f"clip_grad_value_({value:g}): the servers clip to a value above 0; {self._else}")
        if of in self._said:
            value = min(value, self.values[of])
        if front.is_early and value != self.values.get(of):
            raise MisuseError(f"clip_grad_value_() is new in this step, whose gradients are pushed already: prepare(..., overlap=False), or {_MEAN}")
        self.values[of] = value
        self._said.add(of)
        return (None,)

    def _ask(self, call: Call, of: Optional[int], bound: Optional[float]) -> float:
        """Pushes the step's gradients, waits for the norm of their mean, and returns it as it is after earlier calls."""
        front = self._front
        if bound is not None and not bound > 0:
            raise MisuseError(f"{call.name}(max_norm={bound:g}): the servers clip to a norm above 0; {self._else}")
        gradients: list[tuple[int, int]] = []
        if self.handed is None:
            if of in self._said:
                raise MisuseError(f"clip_grad_norm_() behind clip_grad_value_(): the servers clip by norm first; {self._else}")
            if front.clips_by_setting:
                raise MisuseError("the script clips, and the servers too: prepare() without clip_norm and clip_value")
            if front.is_early and not self.by_norm:
                raise MisuseError(f"clip_grad_norm_() is new in this step, whose gradients are pushed already: prepare(..., overlap=False), or {_MEAN}")
            if not self.by_norm:
                front._session.clip_steps(True)
                self.by_norm = True
            front.run._joined()
            self._forget_value(of)
            own = [g for i in self._steps_with(of) if (g := front.flat.params[i].grad) is not None]
            scaled = of in self.unscaled
            skips = scaled and not all(bool(g.isfinite().all()) for g in own)
            gradients = front.hand_over(of, scaled=scaled, skips=skips)
            self.handed, self.of, self._factor = marks(self._gradients()), of, 1.0
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
        now = self._gradients()
        return not all(_is_as(now[i], self.handed[i]) for i in self._steps_with(self.of))

    def _steps_with(self, of: Optional[int]) -> Iterable[int]:
        """The parameters that an optimizer steps."""
        front = self._front
        return range(len(front.flat.params)) if of is None else front._parts[of][0]

    def left_out(self) -> None:
        """Gradients came after those that were handed over, or were changed, and no step was made.

        Raises:
            MisuseError: the other workers make it.
        """
        if math.isfinite(self._norm):
            raise MisuseError(
                "clip_grad_norm_() has pushed the gradients of a step, and optimizer.step() did not follow before other gradients were computed, "
                "changed or clipped: the other workers wait for it. "
                + ("Step each optimizer before the next one is clipped" if self._front._parts else f"To leave steps out, {_MEAN}")
            )
        self.ends(self.of)
        self._front._pushed.clear()
        try:
            self._front.run._finish_step([])
        except DivergedError:
            pass  # the step is skipped, as the script has decided

    def steps(self, of: Optional[int]) -> bool:
        """A step begins; whether its gradients are handed over.

        Raises:
            MisuseError: others are.
        """
        if self.handed is not None and self.of != of:
            raise MisuseError("clip_grad_norm_() has pushed the gradients of one optimizer, and another one steps: step the first before")
        if self.is_changed():
            self.left_out()
        if self.handed is None:
            self._forget_value(of)
        return self.handed is not None

    def _forget_value(self, of: Optional[int]) -> None:
        """The bound on values of an earlier step is not one of this step, unless the script has given it again."""
        if of in self.values and of not in self._said:
            if self._front.is_early:
                raise MisuseError("clip_grad_value_() was not called in this step, and its gradients are pushed as if: prepare(..., overlap=False)")
            del self.values[of]

    def ends(self, of: Optional[int]) -> None:
        """The step's gradients are pushed."""
        self.handed = None
        self._said.discard(of)
        self.unscaled.discard(of)
        if self._stepped is None:
            params = self._front.flat.params
            for i in self._steps_with(of):
                if params[i].grad is not None:
                    self._samples[i] = _mark(params[i].grad)
                    break
        else:
            now = marks(self._gradients())
            for i in self._steps_with(of):
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
