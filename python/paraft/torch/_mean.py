"""``apply="mean"``: the servers average the gradients, and every worker runs the script's optimizer on the mean.

All workers compute the same weights and the same state of the optimizer, bit by bit. Each writes a share of both to the
servers, so that a worker that joins or comes back, and a checkpoint, have them.
"""

from __future__ import annotations

import enum
import functools
import logging
import math
import weakref
from typing import Any, Optional, Union

import torch

from .. import _paraft
from .._run import Run
from ..errors import ConfigError, DivergedError, MisuseError
from ._checkpoints import note
from ._clip_calls import Call
from ._clipping import Mark, are_as, marks
from ._flat import Flat
from ._state import State, Uncarried, own_step
from ._steps import OnServers, check_step, stepping
from ._untrained import join

_LOG = logging.getLogger("paraft")


def refusal(run: Run, optimizer: torch.optim.Optimizer, constraints: bool) -> Union[str, State]:
    """Why a job cannot run this optimizer on the mean gradient, or else where the servers keep its state."""
    if run._group is not None:
        return "the ranks of a group are one worker, and only one of them has the servers' mean"
    if run._leased:
        return "leased data goes with the servers' optimizer"
    if constraints:
        return "constraints go with the servers' optimizer"
    if not _paraft.in_rounds_of_all(run._job, [*run._settings, *run._leased.get("settings", ())]):
        return "only in mode bsp, without backup workers, is there a mean of all workers' gradients"
    try:
        check_step(optimizer)
        return State(optimizer, _in_order(optimizer))
    except ConfigError as why:
        return str(why)
    except Uncarried as why:
        return f"the servers cannot hold the state of {type(optimizer).__name__}: {why}"


def _in_order(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _code(optimizer: torch.optim.Optimizer) -> str:
    """What must be the same on all workers for the same bits."""
    kind = type(optimizer)
    device = next(p.device for p in _in_order(optimizer))
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    said = f"mean {kind.__module__}.{kind.__qualname__} torch {torch.__version__} {device.type} {on}"
    return said.replace(",", " ")


class _Taken(enum.Enum):
    """What became of a step's gradients that were pushed before ``step()``, because the script clips or unscales them."""

    #: Their mean is in ``p.grad``, and the optimizer has not run.
    MEAN = enum.auto()
    #: All workers skip the step, or this worker continues with other weights: ``step()`` has nothing to do.
    NOTHING = enum.auto()


class OnMean(OnServers):
    """The servers average gradients, and this worker's optimizer makes the step.

    ``step()`` pushes, waits for the mean, and runs the optimizer on it. If the script clips or unscales gradients before,
    that call does the first two. Then ``p.grad`` is the mean, as behind DDP's ``backward()``, and the script may change it;
    ``step()`` runs the optimizer on what is there.
    """

    #: All workers' GradScalers find the same, in the mean.
    must_skip = False

    def __init__(self, run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, state: State, **options: Any) -> None:
        self._state = state
        self._optimizer = optimizer
        self._inner = own_step(type(optimizer))
        #: The optimizer is in its own step.
        self.inside = False
        self._rate: Optional[float] = None
        #: The run's moves to another step so far, and the step whose results are this worker's own.
        self._moves_known, self._own = 0, -1
        #: What the script's call has taken, and whether one is taking it.
        self._taken: Optional[_Taken] = None
        self._taking = False
        #: The wait of such a call was interrupted, and the call was not made again.
        self._cut_off = False
        #: The mean is of unscaled gradients, and the GradScaler does not know.
        self._unscaled = False
        #: The optimizer's zero_grad() was called since.
        self._zeroed = False
        #: The tensors that the mean was written to.
        self._given: list[Optional[torch.Tensor]] = []
        #: What the servers refused of this worker's gradients; ``step()`` raises it.
        self._refused: Optional[DivergedError] = None
        #: The marks of the gradients that were stepped.
        self._stepped: list[Mark] = []
        self._told_late = False
        super().__init__(run, model, optimizer, constraints={}, **options)

    def _flat(self, model: torch.nn.Module, optimizer: Any) -> Flat:
        return Flat(model, optimizer, None, self._state.values)

    def _join(self, model: torch.nn.Module, optimizer: Any, settings: list[str]) -> Any:
        run, flat = self.run, self.flat
        self._state.gather(flat.state)
        return join(
            run,
            model,
            flat,
            flat.tensors,
            flat.values.data_ptr(),
            flat.values.numel(),
            flat.values,
            settings=settings,
            results=flat.results,
            code=_code(optimizer),
            note=note(None, model, flat),
        )

    # ---- the script's own view of the mean ----

    def _listen(self) -> None:
        me = weakref.ref(self)

        def computed(p: torch.Tensor) -> None:
            front = me()
            if front is not None:
                front._stepped = []
                if front._taken is not None:
                    front._begun_again(p)

        params: list[Any] = self.flat.params  # untyped in torch
        self.run._hooks += [p.register_post_accumulate_grad_hook(computed) for p in params]

    def _begun_again(self, p: torch.Tensor) -> None:
        """A backward pass after the mean was taken: has the script left the step out?"""
        out_of_place = torch.is_grad_enabled()  # create_graph=True adds up in a new tensor
        others = zip(self.flat.params, self._given)
        thrown = self._zeroed or not out_of_place and all(q.grad is None or q.grad is not given for q, given in others)
        if not thrown:
            raise MisuseError(
                f"a backward pass has reached `{self.flat.names[[id(q) for q in self.flat.params].index(id(p))]}` since clip_grad_norm_() or "
                "scaler.unscale_() took the workers' mean gradient, and before optimizer.step(): it would add this worker's own gradient to the "
                "mean. Clip behind the last backward pass of a step (the others in `with run.no_sync():` clip each worker's own); to leave "
                "a step out, call optimizer.zero_grad() before the next backward pass, on all workers"
            )
        self._leave_out()

    def clips(self, call: Call) -> None:
        """From here on ``p.grad`` is the mean, if these are gradients of a step that is not made yet."""
        missing = [i for i, p in self._params if p.grad is None] if call.gradients else []
        if self._take(None) and any(bool(self.flat.means[i].any()) for i in missing):
            name = next(self.flat.names[i] for i in missing if bool(self.flat.means[i].any()))
            raise MisuseError(
                f"`{name}` has no gradient of this worker's, and the mean has one, which is not among those that get_total_norm() was given: "
                "call clip_grad_norm_(parameters, math.inf) before, which makes p.grad the mean of all workers"
            )

    def unscales(self, scale: torch.Tensor, of: Optional[int] = None) -> bool:
        # Scales may differ, as that of a worker that came back: the mean is of unscaled gradients.
        self._take(scale)
        return self._taken is not None and self._unscaled

    def _take(self, scale: Optional[torch.Tensor]) -> bool:
        """Pushes the step's gradients and waits for their mean, if there are any; whether this call has."""
        run = self.run
        if run._waits:
            run._resume_wait()
        if self._taken is not None:
            if self._cut_off and self._taken is _Taken.MEAN:
                self._show_mean()
            self._cut_off = False
            return False
        if run._quiet or run._finished or self._nothing_new():
            return False
        self._unscaled, self._taking, self._cut_off = scale is not None, True, True
        self._told_late |= not math.isnan(run._trained_on()[0] if scale is None else run._loss)
        try:
            super().step(None if scale is None else torch.zeros((), device="cpu"), scale)
        except DivergedError as e:
            self._refused = e
        except BaseException:
            self._taking = self._cut_off = run._waits  # an interrupted wait continues
            raise
        self._cut_off = False
        return True

    def _nothing_new(self) -> bool:
        """Whether there are no gradients, or only those of the last step."""
        gradients = [p.grad for p in self.flat.params]
        return all(g is None for g in gradients) or bool(self._stepped) and are_as(gradients, self._stepped)

    @torch.no_grad()
    def _show_mean(self) -> None:
        """The mean is in ``p.grad``. If all workers skip the step, it is what DDP's mean would have somewhere: an infinity."""
        for p in self.flat.params:
            if p.grad is None:
                p.grad = torch.empty_like(p)
        self._given = [p.grad for p in self.flat.params]
        gradients = [p.grad for p in self.flat.params if p.grad is not None]
        if self._taken is _Taken.MEAN:
            torch._foreach_copy_(gradients, self.flat.means)
        else:
            for gradient in gradients:
                gradient.fill_(math.inf)

    def thrown(self) -> None:
        """The optimizer's ``zero_grad()`` was called."""
        self._zeroed = self._taken is not None

    def _check_cut_off(self) -> None:
        if self._cut_off and self.run.workers > 1:
            raise MisuseError(
                "a call such as clip_grad_norm_() was interrupted while it waited for the workers' mean gradient, which the other workers have "
                "clipped: make the call again, and what follows it, then optimizer.step()"
            )
        self._cut_off = False

    # ---- steps ----

    def step(self, found_inf: Optional[torch.Tensor], scale: Optional[torch.Tensor], of: Optional[int] = None) -> None:
        """Runs the optimizer on the mean, or on what the script has made of it."""
        run = self.run
        self._check_cut_off()
        if self._taking:
            run._resume_wait()
        if self._taken is None:
            if not run._waits and run._joined().applies() is not None:
                raise MisuseError(
                    "an earlier optimizer.step() was interrupted while it changed the weights, which are no longer the other workers': end this "
                    "process; another one may take its place"
                )
            super().step(found_inf, scale)
            return
        refused, self._refused = self._refused, None
        if self._taken is _Taken.NOTHING:
            run._resume_wait()
            self._taken = None
            self._remember()
        else:
            run._joined()
            self.flat.check()
            self._own_writes()
            if not math.isnan(run._loss) and not self._told_late:
                self._told_late = True
                _LOG.warning("run.log() came behind clip_grad_norm_() or scaler.unscale_(), which end the step's record: call it before them")
            if scale is not None and not self._unscaled:
                torch._foreach_mul_([p.grad for p in self.flat.params if p.grad is not None], 1.0 / float(scale))
            self._finish(found_inf is None or float(found_inf) == 0.0)
        if refused is not None and found_inf is None:
            raise refused

    def tell_rates(self) -> bool:
        """Passes on the first group's rate, for the record."""
        rate = self._optimizer.param_groups[0].get("lr")
        if rate is not None and float(rate) != self._rate and float(rate) >= 0:
            self._rate = float(rate)
            self._session.options([(self._rate, {})])
        return False

    def _own_writes(self) -> None:
        name = self.flat.written()
        if name is not None:
            raise MisuseError(
                f"`{name}` was written to outside of optimizer.step(), as p.data.clamp_(), load_state_dict() and Embedding(max_norm=) do: a worker "
                "that joins would have other weights than this one. Write it inside of the optimizer's step(), load weights before "
                "run.prepare(), or prepare(..., apply=\"worker\")"
            )

    def _remedy(self) -> str:
        return (
            "before the workers' mean was taken. Call torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf) first: it makes p.grad the "
            "mean, which the script may then change as it likes, on all workers alike."
        )

    def pulled(self) -> None:
        """The vector has new values: the mean gradient, or everything."""
        run = self.run
        applies = self._session.applies() if hasattr(self, "_session") and not run._finished and run._session is not None else None
        taking, self._taking = self._taking, False
        if applies is None:
            # Otherwise what the pull brought is not what this worker has computed.
            if self._moves_known != run._moves or self._own != run._step or run._finished:
                self._moves_known, self._own = run._moves, run._step
                self._state.restore(self.flat.state)
                self.flat.spread()
            super().pulled()
            if taking:
                self._taken = _Taken.NOTHING
            return
        if applies or taking:
            self._taken = _Taken.MEAN if applies else _Taken.NOTHING
            self._show_mean()
        if applies and taking:
            return
        self._finish(applies)
        if taking:
            self._taken = _Taken.NOTHING

    def _finish(self, steps: bool) -> None:
        """Ends the step: runs the optimizer, unless the script leaves it out, and writes the results."""
        whole, self._taken = self._taken is _Taken.MEAN, None
        if whole:
            if steps:
                self._optimize()
            self.flat.gather()
            self.flat.round()
            self._state.gather(self.flat.state)
        self._remember()
        self._own = self.run._step + 1
        self.run._waited(lambda session: session.applied())

    def _remember(self) -> None:
        self._stepped = marks([p.grad for p in self.flat.params])
        self._given, self._zeroed = [], False

    def _leave_out(self) -> None:
        """The script makes no step with the mean that it took: all workers keep their weights."""
        self._check_cut_off()
        self._refused = None
        if self._taken is _Taken.MEAN:
            self._finish(False)
        self._taken, self._stepped, self._given, self._zeroed = None, [], [], False

    def _optimize(self) -> None:
        optimizer: Any = self._optimizer
        # They are the gradients' own, and a fused optimizer would unscale them once more.
        scaled: dict[str, Any] = {name: optimizer.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in optimizer.__dict__}
        self.inside = True
        try:
            with torch.enable_grad():
                self._inner(optimizer)
        finally:
            self.inside = False
            optimizer.__dict__.update(scaled)

    def unsaved(self) -> None:
        """The script saves.

        Raises:
            MisuseError: a step is half made.
        """
        if self._taken is _Taken.MEAN or self._taking:
            raise MisuseError("run.save() between clip_grad_norm_() or scaler.unscale_() and optimizer.step(): call it behind the step")

    def state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The optimizer has its state itself."""
        return {}

    def keep_state(self) -> None:
        """The optimizer keeps its state."""

    def ends(self) -> None:
        """No step follows."""
        self.run._resume_wait()
        if self._taken is not None:
            self._leave_out()
        self.flat.follow_memory()
        super()._own_writes()


@functools.lru_cache(maxsize=None)
def means(kind: Any) -> type[torch.optim.Optimizer]:
    """The class of an optimizer that runs on the mean gradient."""

    def load_state_dict(self: Any, state_dict: Any) -> None:
        raise MisuseError("the optimizer's state is the same on all workers since run.prepare(): load it before, or paraft.init(resume=...)")

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.zero_grad(self, *args, **kwargs)
        front = getattr(self, "_paraft", None)
        if front is not None:
            front.thrown()

    return stepping(kind, load_state_dict=load_state_dict, zero_grad=zero_grad)
