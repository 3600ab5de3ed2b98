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
from ._clipping import SCALED, Mark, Turn, are_as, marks
from ._flat import Flat
from ._state import States, Uncarried, own_step
from ._steps import OnServers, check_step, stepping
from ._together import Optimizers, each
from ._untrained import join

_LOG = logging.getLogger("paraft")


def refusal(run: Run, optimizer: Optimizers, constraints: bool) -> Union[str, States]:
    """Why a job cannot run these optimizers on the mean gradient, or else where the servers keep their state."""
    if run._group is not None:
        return "the ranks of a group are one worker, and only one of them has the servers' mean: make each rank a worker, without group="
    if run._leased:
        return "leased data goes with the servers' optimizer"
    if constraints:
        return "constraints go with the servers' optimizer"
    if not _paraft.in_rounds_of_all(run._job, [*run._settings, *run._leased.get("settings", ())]):
        return "only in mode bsp, without backup workers, is there a mean of all workers' gradients"
    try:
        for one in each(optimizer):
            check_step(one)
        return States(each(optimizer))
    except ConfigError as why:
        return str(why)
    except Uncarried as why:
        return f"the servers cannot hold the state of {why}"


def _code(optimizer: Optimizers) -> str:
    """What must be the same on all workers for the same bits."""
    kinds = "+".join(f"{type(one).__module__}.{type(one).__qualname__}" for one in each(optimizer))
    device = next(p.device for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    said = f"mean {kinds} torch {torch.__version__} {device.type} {on}"
    return said.replace(",", " ")


class _Taken(enum.Enum):
    """What became of a step's gradients: they are pushed, and not all optimizers have stepped since."""

    #: Their mean is in ``p.grad``.
    MEAN = enum.auto()
    #: All workers skip the step, or this worker continues with other weights: ``step()`` has nothing to do.
    NOTHING = enum.auto()


class OnMean(OnServers):
    """The servers average gradients, and this worker's optimizer makes the step.

    ``step()`` pushes, waits for the mean, and runs the optimizer on it. If the script clips or unscales gradients before,
    that call does the first two. Then ``p.grad`` is the mean, as behind DDP's ``backward()``, and the script may change it;
    ``step()`` runs the optimizer on what is there.

    The mean is of all gradients. So each of several optimizers steps on it, and what they have made is one step of the run.
    It ends with the last of them, or when the script continues without the others: with a forward or backward pass, or with
    another step of the same optimizer.
    """

    #: All workers' GradScalers find the same, in the mean.
    must_skip = False

    def __init__(self, run: Run, model: torch.nn.Module, optimizer: Optimizers, *, state: States, **options: Any) -> None:
        self._state = state
        self._optimizers = each(optimizer)
        self._inner = [own_step(type(one)) for one in self._optimizers]
        #: An optimizer is in its own step.
        self.inside = False
        self._rate: Optional[float] = None
        #: The run's moves to another step so far, and the step whose results are this worker's own.
        self._moves_known, self._own = 0, -1
        #: What was taken, and whether it is being taken: by the step() of this optimizer, or by a call that clips or unscales.
        self._taken: Optional[_Taken] = None
        self._taking = False
        self._turn: Optional[int] = None
        #: The optimizers that have stepped on what was taken.
        self._made: set[int] = set()
        #: The wait of such a call was interrupted, and the call was not made again.
        self._cut_off = False
        #: What the gradients were divided by before the mean, and the optimizers whose GradScaler knows.
        self._scale: Optional[float] = None
        self._known: set[int] = set()
        #: What the servers refused of this worker's gradients; ``step()`` raises it.
        self._refused: Optional[DivergedError] = None
        #: The marks of the gradients of the last step.
        self._stepped: list[Mark] = []
        #: The parameters of the optimizers that take the mean; None: all.
        self._its: Optional[set[int]] = None
        #: Those of the others whose gradients are of an earlier step, which all workers have skipped.
        self._infinite: set[int] = set()
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

        def hook(i: int) -> Any:
            def computed(_: torch.Tensor) -> None:
                front = me()
                if front is not None:
                    front._end()
                    if front._stepped:
                        front._stepped[i] = None

            return computed

        params: list[Any] = self.flat.params  # untyped in torch
        self.run._hooks += [p.register_post_accumulate_grad_hook(hook(i)) for i, p in enumerate(params)]

    def passes(self) -> None:
        """A forward pass begins, which may move running statistics."""
        if self._made:
            self._end()

    def clips(self, call: Call) -> None:
        """From here on ``p.grad`` is the mean, if these are gradients of a step that is not made yet."""
        given = set(map(id, call.tensors))
        its = {i for i, p in self._params if id(p.grad if call.gradients else p) in given}
        missing = [i for i, p in self._params if p.grad is None] if call.gradients else []
        if self._take(None, [of for of, (part, _) in enumerate(self._parts) if part & its]) and any(bool(self.flat.means[i].any()) for i in missing):
            name = next(self.flat.names[i] for i in missing if bool(self.flat.means[i].any()))
            raise MisuseError(
                f"`{name}` has no gradient of this worker's, and the mean has one, which is not among those that get_total_norm() was given: "
                "call clip_grad_norm_(parameters, math.inf) before, which makes p.grad the mean of all workers"
            )

    def unscales(self, scale: torch.Tensor, of: Optional[int] = None) -> Optional[float]:
        # Scales may differ, as that of a worker that came back: the mean is of unscaled gradients.
        self._take(scale, [of or 0])
        if self._taken is not _Taken.MEAN:
            return None if self._taken is None else 1.0
        if self._scale is None:
            raise MisuseError(SCALED)
        self._known.add(of or 0)
        return self._scale / float(scale)  # several optimizers may have GradScalers of their own

    def _take(self, scale: Optional[torch.Tensor], places: list[int]) -> bool:
        """Pushes the step's gradients and waits for their mean, if there are any; whether this call has. ``places``: the optimizers
        that are to step."""
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
        self._taking, self._turn, self._cut_off = True, None, True
        self._told_late |= not math.isnan(run._trained_on()[0] if scale is None else run._loss)
        try:
            self._push_all(None if scale is None else torch.zeros((), device="cpu"), scale, places)
        except DivergedError as e:
            self._refused = e
        except BaseException:
            self._taking = self._cut_off = run._waits  # an interrupted wait continues
            raise
        self._cut_off = False
        return True

    def _push_all(self, found_inf: Optional[torch.Tensor], scale: Optional[torch.Tensor], places: list[int]) -> None:
        """Pushes the gradients of all optimizers, and waits for the mean. :meth:`pulled` continues."""
        self._scale, self._known = None if scale is None else float(scale), set()
        self._its, self._earlier, self._infinite = None, set(), set()
        if self._parts:
            self._its = its = set().union(*(self._parts[of][0] for of in places))
            gradients = [p.grad for p in self.flat.params]
            # A later step of the others' begins with zero_grad(), or adds to the mean that they have.
            others = [i for i, g in enumerate(gradients) if i not in its and g is not None]
            self._earlier = {i for i in others if self._stepped and are_as([gradients[i]], [self._stepped[i]])}
            self._infinite = {i for i in self._earlier if not bool(gradients[i].isfinite().all())}  # type: ignore[union-attr]
        super().step(found_inf, scale)

    def _steps_with(self, turn: Turn) -> Optional[set[int]]:
        return self._its

    def _gradients(self, params: list[tuple[int, Any]]) -> list[tuple[int, int]]:
        return [(i, 0 if i in self._infinite else address) for i, address in super()._gradients(params)]

    def _nothing_new(self) -> bool:
        """Whether there are no gradients, or only those of the last step."""
        gradients = [p.grad for p in self.flat.params]
        return all(g is None for g in gradients) or bool(self._stepped) and are_as(gradients, self._stepped)

    @torch.no_grad()
    def _show_mean(self) -> None:
        """The mean is in ``p.grad``. If all workers skip the step, it is what DDP's mean would have somewhere: an infinity."""
        shown = [(p, mean) for (i, p), mean in zip(self._params, self.flat.means) if i not in self._infinite]
        for p, _ in shown:
            if p.grad is None:
                p.grad = torch.empty_like(p)
        gradients = [p.grad for p, _ in shown if p.grad is not None]
        if self._taken is _Taken.MEAN:
            torch._foreach_copy_(gradients, [mean for _, mean in shown])
        else:
            for gradient in gradients:
                gradient.fill_(math.inf)

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
        run, place = self.run, of or 0
        self._check_cut_off()
        if run._waits:
            turn = self._turn
            run._resume_wait()
            if turn == place:
                return  # called again
        if place in self._made:
            self._end()
        if self._taken is None:
            if run._joined().applies() is not None:
                raise MisuseError(
                    "an earlier optimizer.step() was interrupted while it changed the weights, which are no longer the other workers': end this "
                    "process; another one may take its place"
                )
            self._taking, self._turn = True, place
            try:
                self._push_all(found_inf, scale, [place])
            except BaseException:
                self._taking = self._taking and run._waits  # an interrupted wait continues
                raise
            return
        refused, self._refused = self._refused, None
        self._turn = place
        if self._taken is _Taken.NOTHING:
            self._made_by(place)
        else:
            run._joined()
            self.flat.check(self._parts[place][0] if self._parts else None)
            self._own_writes()
            if self._scale is not None and place not in self._known:
                raise MisuseError(
                    "another optimizer's GradScaler has unscaled the gradients of this one too, which has none: step it before the other's backward "
                    "pass, or with the GradScaler"
                )
            if not math.isnan(run._loss) and not self._told_late:
                self._told_late = True
                _LOG.warning("run.log() came behind clip_grad_norm_() or scaler.unscale_(), which end the step's record: call it before them")
            self._make(place, found_inf is None or float(found_inf) == 0.0)
        if refused is not None and found_inf is None:
            raise refused

    def tell_rates(self) -> bool:
        """Passes on the first group's rate, for the record."""
        rate = self._optimizers[0].param_groups[0].get("lr")
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
        if not taking:
            return
        self._taken = _Taken.MEAN if applies else _Taken.NOTHING
        if applies or applies is False and self._turn is None:
            self._show_mean()
        if applies is False:
            self._finish()
            self._taken = _Taken.NOTHING
        if self._turn is not None:
            self._make(self._turn, True) if applies else self._made_by(self._turn)

    def _make(self, place: int, steps: bool) -> None:
        """Runs an optimizer on the mean, unless its step is left out."""
        self._taken = None  # until the weights are whole again
        if steps:
            self._optimize(place)
        self._taken = _Taken.MEAN
        if len(self._made) + 1 == len(self._optimizers):
            return self._finish()
        self._made_by(place)
        self.flat.mark()

    def _made_by(self, place: int) -> None:
        """This optimizer is done with what was taken."""
        self._made.add(place)
        if len(self._made) == len(self._optimizers):
            self._forget_taken()

    def _forget_taken(self) -> None:
        self._taken, self._stepped = None, marks([p.grad for p in self.flat.params])
        self._made.clear()

    def _finish(self) -> None:
        """Ends the step: writes the results."""
        self._forget_taken()
        if self._session.applies():
            self.flat.gather()
            self.flat.round()
            self._state.gather(self.flat.state)
        self._own = self.run._step + 1
        self.run._waited(lambda session: session.applied())

    def _end(self) -> None:
        """The script continues without a step of the other optimizers, or of any, which all workers do."""
        if self._taken is None:
            return
        self._check_cut_off()
        self._refused = self._turn = None
        if self._taken is _Taken.MEAN:
            self._finish()
        else:
            self._forget_taken()

    def _optimize(self, place: int) -> None:
        optimizer: Any = self._optimizers[place]
        # They are the gradients' own, and a fused optimizer would unscale them once more.
        scaled: dict[str, Any] = {name: optimizer.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in optimizer.__dict__}
        self.inside = True
        try:
            with torch.enable_grad():
                self._inner[place](optimizer)
        finally:
            self.inside = False
            optimizer.__dict__.update(scaled)

    def unsaved(self) -> None:
        """The script saves.

        Raises:
            MisuseError: a step is half made.
        """
        if self._made:
            self._end()
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
        self._end()
        self.flat.follow_memory()
        super()._own_writes()


@functools.lru_cache(maxsize=None)
def means(kind: Any) -> type[torch.optim.Optimizer]:
    """The class of an optimizer that runs on the mean gradient."""

    def load_state_dict(self: Any, state_dict: Any) -> None:
        raise MisuseError("the optimizer's state is the same on all workers since run.prepare(): load it before, or paraft.init(resume=...)")

    return stepping(kind, load_state_dict=load_state_dict)
