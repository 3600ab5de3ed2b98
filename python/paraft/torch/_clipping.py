"""Clipping behind ``backward()`` where the servers run the optimizer. In ``bsp`` they clip the mean gradient by the script's
bound, as ``clip_grad_norm_()`` does under DDP; in other modes each worker clips its own gradient before its push."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Optional

import torch

from ..errors import DivergedError, MisuseError
from ._clip import Call

if TYPE_CHECKING:
    from ._steps import OnServers

_MEAN = "prepare(..., apply=\"mean\") allows it in mode bsp"


def marks(gradients: list[Optional[torch.Tensor]]) -> list[Any]:
    """What changes when gradients do, or are others."""
    return [None if g is None else (g._version, g.data_ptr()) for g in gradients]


class Clipping:
    """What a script clips in a step."""

    def __init__(self, front: OnServers) -> None:
        self._of = weakref.ref(front)
        #: Gradients are pushed as those of clipped steps, whose rounds wait for the norm.
        self.by_norm = False
        #: The marks of the gradients that a clip_grad_norm_() of this step has handed over, and which of several optimizers they are of.
        self.handed: Optional[list[Any]] = None
        self.of: Optional[int] = None
        self._norm = math.nan
        #: They are not finite, and the servers skip the step.
        self._skips = False
        #: The bound on values that the servers know, and whether the script has given it in this step.
        self.value: Optional[float] = None
        self._said_value = False
        #: The marks of the gradients of the last step, from the first call on.
        self._stepped: Optional[list[Any]] = None
        #: A GradScaler has unscaled the gradients of this step.
        self.unscaled = False

    @property
    def _front(self) -> OnServers:
        front = self._of()
        assert front is not None
        return front

    def _marks(self) -> list[Any]:
        return marks([p.grad for p in self._front.flat.params])

    def clips(self, call: Call) -> Optional[tuple[Any]]:
        """The script clips, or asks for a norm. Returns what the call returns; None: torch does it.

        Raises:
            MisuseError: the servers cannot do it.
        """
        front = self._front
        run, now = front.run, self._marks()
        fresh = any(now) and now != self._stepped
        first, self._stepped = self._stepped is None, self._stepped or []
        if first and front._steps and call.name == "get_total_norm":
            fresh = False  # of the last step's gradients, for all that is known
        if run._quiet or run._finished or run._waits or not fresh:
            return None
        if run.mode != "bsp":
            self._by_worker()
            return None
        of = self._whole(call)
        if self.handed is not None and (self.of != of or self.handed != now):
            self._left_out()
        if call.name == "clip_grad_value_":
            return self._by_value(call.number("clip_value"))
        if call.name == "clip_grads_with_norm_":
            if self.handed is None or abs(call.number("total_norm") - self._norm) > 1e-6 * abs(self._norm):
                raise MisuseError(f"clip_grads_with_norm_() with another norm than the last get_total_norm()'s: {_MEAN}")
            self._ask(call, of, call.number("max_norm"))
            return (None,)
        if call.number("norm_type") != 2.0:
            raise MisuseError(f"{call.name}(norm_type={call.number('norm_type'):g}): the servers clip by the norm of type 2; {_MEAN}")
        self._ask(call, of, call.number("max_norm") if call.name == "clip_grad_norm_" else None)
        if call.must_be_finite and not math.isfinite(self._norm):
            raise RuntimeError(f"the norm of the mean gradient is {self._norm}, so that it cannot be clipped (error_if_nonfinite=True)")
        return (torch.tensor(self._norm, dtype=torch.float32, device=front.flat.params[0].device),)

    def _by_worker(self) -> None:
        """This worker clips its own gradient."""
        front = self._front
        front.push_late("clip_grad_norm_() changes this worker's own gradients in this mode")
        front._pushed.clear()

    def _whole(self, call: Call) -> Optional[int]:
        """The optimizer, of several, whose gradients these are.

        Raises:
            MisuseError: not all of one's gradients are among them.
        """
        front = self._front
        given = set(map(id, call.tensors))
        its = {i for i, p in front._params if id(p.grad if call.gradients else p) in given and p.grad is not None}
        have = {i for i, p in front._params if p.grad is not None}
        for of, (part, _) in enumerate(front._parts):
            if its == have & part:
                return of
        if not front._parts and its == have:
            return None
        name = front.flat.names[min(have - its, default=0)]
        raise MisuseError(f"{call.name}() of some parameters, without `{name}`: the servers clip the whole gradient of an optimizer; {_MEAN}")

    def _by_value(self, value: float) -> tuple[None]:
        front = self._front
        if self.handed is not None:
            return self._late("clip_grad_value_() behind clip_grad_norm_()")
        if not value > 0:
            raise MisuseError(f"clip_grad_value_({value:g}): the servers clip to a value above 0; {_MEAN}")
        if front.is_early and value != self.value:
            raise MisuseError(f"clip_grad_value_() is new in this step, whose gradients are pushed already: prepare(..., overlap=False), or {_MEAN}")
        self.value, self._said_value = value, True
        return (None,)

    def _late(self, what: str) -> tuple[None]:
        raise MisuseError(f"{what}: the gradients are pushed already; {_MEAN}")

    def _ask(self, call: Call, of: Optional[int], bound: Optional[float]) -> None:
        """Pushes the step's gradients, and waits for the norm of their mean."""
        front = self._front
        if bound is not None and not bound > 0:
            raise MisuseError(f"{call.name}(max_norm={bound:g}): the servers clip to a norm above 0; {_MEAN}")
        gradients: list[tuple[int, int]] = []
        if self.handed is None:
            if self._said_value:
                raise MisuseError(f"clip_grad_norm_() behind clip_grad_value_(): the servers clip by norm first; {_MEAN}")
            if front.clips_by_setting:
                raise MisuseError("the script clips, and the servers too: prepare() without clip_norm and clip_value")
            if front.is_early and not self.by_norm:
                raise MisuseError(f"clip_grad_norm_() is new in this step, whose gradients are pushed already: prepare(..., overlap=False), or {_MEAN}")
            if not self.by_norm:
                front._session.clip_steps(True)
                self.by_norm = True
            front.run._joined()
            skips = self.unscaled and not all(bool(p.grad.isfinite().all()) for p in front.flat.params if p.grad is not None)
            gradients = front.hand_over(of, scaled=self.unscaled, skips=skips)
            self.handed, self.of, self._skips = self._marks(), of, skips
        norm = front.run._asked(lambda session: session.norm(gradients, bound))
        self._norm = math.nan if self._skips else norm

    def _left_out(self) -> None:
        """Gradients came after those that were handed over, and no step."""
        if math.isfinite(self._norm):
            raise MisuseError(
                "clip_grad_norm_() has pushed the gradients of a step, and optimizer.step() did not follow: the other workers wait for it. To leave "
                f"steps out, {_MEAN}"
            )
        self.handed = None
        try:
            self._front.run._finish_step([])
        except DivergedError:
            pass  # the step is skipped, as the script has decided

    def steps(self) -> bool:
        """A step begins; whether its gradients are handed over."""
        if self.value is not None and not self._said_value:
            if self._front.is_early:
                raise MisuseError("clip_grad_value_() was not called in this step, and its gradients are pushed as if: prepare(..., overlap=False)")
            self.value = None
        return self.handed is not None

    def ends(self) -> None:
        """The step's gradients are pushed."""
        self.handed, self._said_value, self.unscaled = None, False, False
        if self._stepped is not None:
            self._stepped = self._marks()

    def follows(self) -> None:
        """The step is over: another mode may be in force."""
        front = self._front
        if self.by_norm and not front.run._finished and front.run.mode != "bsp":
            self.by_norm = False
            front._session.clip_steps(False)
            front.push_late("the mode was switched, and the script clips")
