"""The behaviour of ``optimizer.step()`` in a job, with the servers' optimizer or the script's own."""

from __future__ import annotations

import enum
import functools
import logging
import math
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional, Union

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _constraints
from .._paraft import digest
from .._constraints import Constraint
from .._run import Run
from ..errors import ConfigError, MisuseError
from . import _clip_calls, _optim
from ._checkpoints import note, opened, resumes_elsewhere
from ._clip_calls import Call
from ._clipping import Clipping, Turn, each_of
from ._flat import Flat, _holds, _span, apart, is_sharded, own, part, staged
from ._freezing import Freezing
from ._tables import Tables
from ._together import Optimizers, Together, each, heads
from ._untrained import join

_LOG = logging.getLogger("paraft")

#: From this size in bytes on, pushes during the backward pass are worth a hook per parameter.
OVERLAP_BYTES = 4 << 20
#: The replacement of our hooks in a copy of the model, pickled or not: a function that does nothing, and needs
#: nothing of this package.
_NOTHING: tuple[Any, ...] = (functools.partial, (sys.audit, "torch.nn.Module.forward"))
_STRIDED, _FLOAT32 = torch.strided, torch.float32
#: The code of ``loss.backward()``, in whose frame ``self`` is the loss.
_BACKWARD = getattr(torch.Tensor.backward, "__code__", None)


class _Push(enum.Enum):
    """When gradients are pushed."""

    #: By ``step()``, and then decided: the first step shows whether a script changes gradients before it.
    TRY = enum.auto()
    #: During the backward pass.
    EARLY = enum.auto()
    #: By ``step()``.
    LATE = enum.auto()


class Seen:
    """Runs before each forward pass. It ends a wait that Ctrl-C has interrupted, and records the number of samples of
    a step: the first dimension of the model's first tensor argument. (``run.log(loss, samples)`` sets it exactly.)

    A copy of the model, pickled or not, belongs to no run.
    """

    def __init__(self, run: Run, front: object) -> None:
        self._run = weakref.ref(run)
        #: The step of its last samples, and their number: of several models the one that was given most counts.
        self._step, self._samples = -1, 0
        #: Lives as long as the model: a script may drop the optimizer, and later writes must not pass unseen.
        self._front = front

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run = self._run()
        if run is None:
            return
        if run._waits:
            run._resume_wait(aside=True)
        if not module.training:
            return
        if not run._waiting:
            front = run._front()
            if front is not None:
                front.passes()
        if not torch.is_grad_enabled():
            return
        if isinstance(self._front, OnServers):
            self._front.hear()
        for given in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(given, torch.Tensor) and (shape := given.shape):
                if run._step != self._step:
                    self._step, self._samples = run._step, 0
                self._samples += shape[0]
                run._seen = max(run._seen, self._samples)
                return

    def __reduce__(self) -> tuple[Any, ...]:
        return _NOTHING


class _Notes:
    """Runs after each forward pass of a group's rank, whose gradients torch writes until the end of the backward
    pass: records them at that end, after all of torch's own work."""

    def __init__(self, front: OnServers) -> None:
        self._front = weakref.ref(front)

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        front = self._front()
        if front is None or front.run._quiet:
            return
        engine: Any = torch.autograd.Variable._execution_engine
        note = front.note
        computed: Any
        for computed in _computed(output):  # a loss may use any of them
            computed.grad_fn  # older releases need it made before a hook
            computed.register_hook(lambda _: engine.queue_callback(lambda: engine.queue_callback(note)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _NOTHING


def _hear_losses(run: Run, param: Any) -> Any:
    """A hook that runs when a backward pass reaches this parameter: it keeps the loss that ``backward()`` was called on, for scripts
    without ``run.log()``. On the CPU that pass runs in its caller's thread, whose frames lead to the loss. On a GPU it has a thread of its
    own; to read its loss would be to wait for the GPU."""
    run_of, param_of = weakref.ref(run), weakref.ref(param)
    last: Callable[[], Any] = lambda: None

    def hears(_: torch.Tensor) -> None:
        nonlocal last
        run, param, frame = run_of(), param_of(), sys._getframe().f_back
        while frame is not None and frame.f_code is not _BACKWARD:
            frame = frame.f_back
        if run is None or param is None or frame is None:
            return
        given = frame.f_locals  # python makes a dict of them at each access
        loss = given.get("self")
        if given.get("gradient") is not None:
            return
        # A parameter in several reentrant checkpoints is reached more than once.
        if type(loss) is not torch.Tensor or not loss.is_cpu or loss.numel() != 1 or loss is last():
            return
        last = weakref.ref(loss)
        # Losses add up as their gradients do, of which zero_grad() throws away the earlier ones.
        earlier = 0.0 if param.grad is None or math.isnan(run._heard) else run._heard
        run._heard = earlier + loss.item()

    return param.register_hook(hears)


def _stamp(gradient: torch.Tensor) -> float:
    """Changes with a gradient: torch counts writes, except those to parts of sharded gradients."""
    return float(own(gradient).norm()) if is_sharded(gradient) else gradient._version


def _sum(gradient: torch.Tensor) -> int:
    """A digest of a sample of its bytes, if they are on the CPU and contiguous: torch does not count writes to ``.data``."""
    return digest([_span(gradient)], 0)[0] if gradient.layout is _STRIDED and not is_sharded(gradient) else 0


def _computed(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's output with a gradient."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, (dict, list, tuple)):
        for inner in output.values() if isinstance(output, dict) else output:
            yield from _computed(inner)


class OnServers:
    """The servers run the optimizer: workers push gradients and pull weights."""

    #: The servers must hear of a step that this worker's GradScaler skips.
    must_skip = True

    def __init__(
        self,
        run: Run,
        model: torch.nn.Module,
        optimizer: Optimizers,
        *,
        overlap: Optional[bool],
        settings: list[str],
        constraints: Mapping[str, Constraint],
    ) -> None:
        self.run = run
        #: The parameters that each of several optimizers steps, and the groups that it leaves out.
        self._parts: list[tuple[set[int], list[int]]] = []
        self.flat = flat = self._flat(model, optimizer)
        settings = [*settings, *_constraints.settings(constraints, flat.known(), flat.frozen)]
        self._params = list(enumerate(flat.params))
        if isinstance(optimizer, Together):
            self._parts = self._divide(optimizer)
        flat.check_ties()
        self._freezing = Freezing(flat) if flat.freezes else None
        frozen = sum(p.numel() for p in flat.params if not p.requires_grad)
        if frozen:
            _LOG.info(
                "the servers hold the optimizer's frozen parameter groups too, %d values: requires_grad_() begins to train them. If it never does, leave "
                "them out of the optimizer", frozen,
            )
        self._stages: dict[int, torch.Tensor] = {}
        #: The memory for the gradients of a group's ranks, by parameter: the whole, and this rank's part.
        self._shares = self._shared_gradients()
        self._kept: Optional[dict[torch.Tensor, dict[str, torch.Tensor]]] = None
        self._clipping = Clipping(self)
        #: The bounds on values that the servers know.
        self._clip_values: dict[Optional[int], float] = {}
        #: Whether the servers clip by a setting of the job.
        self.clips_by_setting = any(line.startswith("clip.") for line in settings)
        #: Whether that setting bounds the norm.
        self._norm_by_setting = any(line.startswith("clip.norm") for line in (*settings, *run._settings))
        #: Whether the warning was logged that a script's own writes to weights do not last.
        self._told = False
        #: Number of steps that undid such writes.
        self._undone = 0
        self._pushed: dict[int, tuple[torch.Tensor, float]] = {}
        self.tables = Tables(run, model)
        if isinstance(optimizer, Together):
            self.tables.divide(model, [{id(p) for group in one.param_groups for p in group["params"]} for one in optimizer.all])
        #: What a GradScaler has found in the gradients of each optimizer.
        self._found: dict[Optional[int], dict[Any, torch.Tensor]] = {}
        #: The parameters whose gradients are of an earlier step, and unscaled.
        self._earlier: set[int] = set()
        self._session = self._join(model, optimizer, settings)
        self.tables.begin()
        run._front = weakref.ref(self)
        flat.attach(buffers=False)
        # The worker pushes the change of the running statistics by its own forward passes since the pull.
        self._moved = torch.zeros(sum(b.numel() for b in flat.buffers), dtype=torch.float32, device="cpu")
        self._moves = [v.view(b.shape) for v, b in zip(torch.split(self._moved, [b.numel() for b in flat.buffers]), flat.buffers)]
        self.pulled()
        large = flat.values.numel() * 4 >= OVERLAP_BYTES
        grouped = run._group is not None
        # The backward pass of one optimizer's loss may reach parameters of another, which drops those gradients.
        alone = not self._parts
        self._push = _Push.LATE if overlap is False else _Push.TRY
        self._then = _Push.EARLY if alone and not grouped and (overlap or (overlap is None and large)) else _Push.LATE
        self._asked = bool(overlap)
        #: Whether a gradient arrived twice before the first step, or was thrown away.
        self._twice = self._thrown = False
        #: Digests of gradients, which show writes to ``.data``.
        self._sums: dict[int, int] = {}
        run._hooks += [head.register_forward_pre_hook(Seen(run, self), with_kwargs=True) for head in heads(model)]
        run._hooks.append(register_optimizer_step_pre_hook(_refuse_others(self, optimizer)))
        #: The parameter by which losses are heard, and its hook.
        self._hears: tuple[Any, Any] = (None, None)
        self.hear()
        self._listen()
        self._others = len(run._hooks)
        self._hooks: list[Any] = []
        #: The parameters with a hook that pushes, by index.
        self._hooked: set[int] = set()
        if self._push is _Push.TRY and grouped:
            self._hooks = [model.register_forward_hook(_Notes(self))]
            run._hooks += self._hooks
        elif self._push is _Push.TRY:
            self._hook_all()
        #: Steps until the next check whether a script changes gradients, if they are pushed late: doubled each time.
        self._looks_in = 1 if self._hooks and not grouped and self._then is _Push.LATE else 0
        self._steps = 0
        _clip_calls.watch(self)

    def _listen(self) -> None:
        """Adds further hooks."""

    def passes(self) -> None:
        """A forward pass begins."""

    def hear(self) -> None:
        """Hears losses by a trained parameter, in place of one that is frozen now."""
        param, before = self._hears
        if param is not None and param.requires_grad:
            return
        trained = next((p for p in self.flat.params if p.requires_grad), None)
        if trained is not None:
            hook = _hear_losses(self.run, trained)
            if before is not None:
                before.remove()
                self.run._hooks.remove(before)
            self.run._hooks.insert(0, hook)
            self._hears = trained, hook

    def clips(self, call: Call) -> Optional[tuple[Any]]:
        """The script calls a function of ``torch.nn.utils.clip_grad``: its result, or None if torch's is to run."""
        if self.tables.all and call.name == "clip_grad_value_":
            raise MisuseError(
                f"clip_grad_value_() would leave out the rows of table `{self.tables.all[0].name}`, which are no parameters: clip by the norm, "
                "clip_grad_norm_(), which counts them in"
            )
        return self._clipping.clips(call)

    def unscales(self, scale: torch.Tensor, of: Optional[int] = None) -> Optional[float]:
        """A GradScaler is about to unscale gradients, or to look for infinities in them; returns what it is to multiply them by, or
        None: its own factor. ``of``: which of several optimizers they are of."""
        self._clipping.unscales(of)
        return None

    def unscaled(self, found: dict[Any, torch.Tensor], of: Optional[int], factor: torch.Tensor) -> None:
        """The GradScaler has, by this factor: what it has ``found``, by device."""
        if self.tables.all:
            self.tables.unscale(self.tables.of(None if of is None else [of]), float(factor), found)
        self._found[of] = found

    @property
    def is_early(self) -> bool:
        """Whether gradients are pushed during the backward pass."""
        return self._push is _Push.EARLY

    def push_late(self, why: str) -> None:
        """From now on ``step()`` pushes gradients.

        Raises:
            MisuseError: some are pushed already.
        """
        if self._push is _Push.TRY or self._pushed:
            self._push_at_step(why)
        else:
            self._pushes(_Push.LATE)

    def _flat(self, model: torch.nn.Module, optimizer: Optimizers) -> Flat:
        # Torch's own averaging in a group of ranks has no part for what was frozen before.
        return Flat(model, optimizer, self.run._group, freezes=self.run._group is None)

    def _divide(self, optimizer: Together) -> list[tuple[set[int], list[int]]]:
        """The parameters that each optimizer steps, by index, and the classes of the others' groups.

        Raises:
            ConfigError: two optimizers have the same parameter.
        """
        index = {id(p): i for i, p in self._params}
        classes = iter(self.flat.classes)
        parts: list[tuple[set[int], set[int]]] = []
        seen: set[int] = set()
        for one in optimizer.all:
            its = {index[id(p)] for group in one.param_groups for p in group["params"] if id(p) in index}
            if its & seen:
                raise ConfigError(f"two optimizers have `{self.flat.names[min(its & seen)]}`: a parameter is one's")
            seen |= its
            parts.append((its, {next(classes) for _ in one.param_groups} - {-1}))
        all_classes = {c for _, own in parts for c in own}
        return [(its, sorted(all_classes - own)) for its, own in parts]

    def _join(self, model: torch.nn.Module, optimizer: Optimizers, settings: list[str]) -> Any:
        run, flat = self.run, self.flat
        self._watch = _optim.Watch(optimizer, flat.classes)
        # The optimizer's state of earlier steps: worker 0's, like its weights.
        resumes_elsewhere(run, model, flat, optimizer)
        vectors, updates = _optim.brought(optimizer, flat.params, flat.classes) if run.rank == 0 else ([], [])
        session = join(
            run,
            model,
            flat,
            flat.tensors,
            flat.values.data_ptr(),
            flat.values.numel(),
            flat.values,
            groups=_optim.groups(optimizer, flat.classes, flat.class_values),
            settings=settings,
            state=([v.data_ptr() for v in vectors], updates),
            note=note(optimizer, model, flat),
            tables=self.tables.specs(),
        )
        self.forget(optimizer)
        return session

    def _shared_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        group, params = self.run._group, self.flat.params
        if group is None or not self.flat.sharded:
            return []
        wholes = apart(group.memory(sum(p.numel() for p in params)), [p.shape for p in params])
        return [(whole, part(whole, p)) for whole, p in zip(wholes, params)]

    def _hook_all(self) -> None:
        self._hooked = set()
        self._hooks = []
        self._hook_new()

    def _hook_new(self) -> None:
        """Adds hooks to parameters without one: to a frozen one torch gives none."""
        params: list[tuple[int, Any]] = [(i, p) for i, p in self._params if p.requires_grad and i not in self._hooked]
        self._hooks += [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in params]
        self._hooked.update(i for i, _ in params)
        self.run._hooks[self._others :] = self._hooks

    def _hook(self, i: int) -> Callable[[torch.Tensor], None]:
        me = weakref.ref(self)

        def ready(p: torch.Tensor) -> None:
            front = me()
            if front is not None and not front.run._quiet and p.grad is not None:
                front._ready(i, p.grad)

        return ready

    def note(self) -> None:
        """The backward pass has ended: records its gradients."""
        self._pushed = {i: (p.grad, _stamp(p.grad)) for i, p in self._params if p.grad is not None}

    def _ready(self, i: int, gradient: torch.Tensor) -> None:
        if self._clipping.handed is not None and i in self._pushed:
            self._clipping.left_out()
        if i in self._pushed and self._push is _Push.EARLY:
            raise MisuseError(
                f"the gradient of `{self.flat.names[i]}` was computed a second time before optimizer.step(), and the first is pushed: "
                "put all backward passes but the last into `with run.no_sync():`, or prepare(..., overlap=False), as for a layer that is in "
                "several checkpoint(use_reentrant=True), or for gradients that zero_grad() throws away without a step"
            )
        self._twice |= i in self._pushed
        if self._push is _Push.EARLY:
            if not self._pushed:
                self.tell_rates()
                self._leave_groups([])
            self._session.ready(i, self._address(i, gradient))
        self._pushed[i] = (gradient, gradient._version)
        self._sums[i] = _sum(gradient)

    def _address(self, i: int, gradient: torch.Tensor) -> int:
        if gradient.layout is not _STRIDED:
            raise MisuseError(
                f"the gradient of `{self.flat.names[i]}` is sparse, and the servers hold dense weights: make the layer with sparse=False, or "
                "a table of it, of which a step sends the rows it names: paraft.torch.EmbeddingBag(paraft.torch.Table(...))"
            )
        if self._shares:
            whole, mine = self._shares[i]
            mine.copy_(own(gradient))
            return whole.data_ptr()
        if gradient.dtype is not _FLOAT32 or not gradient.is_contiguous() or not gradient.is_cpu:
            gradient = self._stages[i] = staged(gradient, self._stages.get(i))
        return gradient.data_ptr()

    def step(self, found_inf: Optional[torch.Tensor], scale: Optional[torch.Tensor], of: Optional[int] = None) -> None:
        """Pushes the remaining gradients, waits as the mode requires, and pulls. ``of``: which of several optimizers steps."""
        if self.run._waits:
            return self.run._resume_wait()  # called again: its gradients are pushed
        self.run._joined()
        if self._clipping.is_made(of):
            return
        turn = None if of is None else frozenset([of])
        if self._clipping.steps(of):
            turn, gradients = self._clipping.turn, []
            before, others = self._watch.last, self._classes_of_others(turn)
            if self.tell_rates() and any(a != b for c, (a, b) in enumerate(zip(before, self._watch.last)) if c not in others):
                raise self._late_options("clip_grad_norm_()", "change them before both")
        else:
            skips = found_inf is not None and float(found_inf) != 0.0
            gradients = self.hand_over(turn, scaled=found_inf is not None, scale=scale, skips=skips)
        try:
            self.send(turn, gradients, scaled=found_inf is not None)
        finally:
            if turn is not None:
                self._clipping.made(turn - {of}, None)

    def send(self, turn: Turn, gradients: list[tuple[int, int]], *, scaled: bool) -> None:
        """Pushes these gradients, waits as the mode requires, and pulls. ``scaled``: a GradScaler is in use."""
        self._pushed.clear()
        if self._push is _Push.TRY:
            self._pushes(self._then)
        self._steps += 1
        if self._looks_in and self._push is _Push.LATE and self._steps == self._looks_in:
            self._looks_in *= 2
            self._hook_all()
            self._push = _Push.TRY
        self._clipping.ends(turn)
        before = self.run.stats()["skipped"] if scaled and turn is None else 0
        moves = self.run._moves
        self.tables.hand_over(self._session, self.tables.of(turn))  # last: a step that is refused has handed over nothing
        self.run._finish_step(gradients)
        leaves_out = turn is not None or self._freezing is not None
        missed = leaves_out and not self.run._over and self._session.missed_round()
        if scaled and turn is None:
            missed = missed or self.run.stats()["skipped"] > before
        if scaled and missed:
            # All workers have skipped it because of one: all GradScalers take a lower scale, as under DDP.
            for found in (f for of in each_of(turn) for f in self._found.get(of, {}).values()):
                found.fill_(1.0)
        self._clipping.follows()
        if self._freezing is not None:
            self._freezing.ends()
            if self._hooks:
                self._hook_new()
        if missed and not scaled and self.run._moves == moves:
            self._missed(None if self._freezing is None else self._freezing.untrained(), turn)

    @staticmethod
    def _missed(name: Optional[str], turn: Turn) -> None:
        if name is not None:
            raise MisuseError(
                f"this step has trained `{name}` on no worker, and other parameters it has: on another worker it is frozen, or its gradient was not "
                "finite. Freeze and unfreeze at the same run.step on all workers"
            )
        if turn is not None:
            raise MisuseError(
                "this step was applied on no worker: the other workers stepped another optimizer than this one, or had a gradient that is not finite. "
                "All workers step their optimizers in the same order"
            )

    def hand_over(
        self, turn: Turn, *, scaled: bool = False, scale: Optional[torch.Tensor] = None, skips: bool = False
    ) -> list[tuple[int, int]]:
        """The gradients of a step that are not pushed yet. ``scaled``: a GradScaler is in use; ``scale``: they are still
        multiplied by this; ``skips``: they are not finite."""
        its = self._steps_with(turn)
        self.flat.check(its)
        self._own_writes()
        if scaled:
            self.run._heard = math.nan  # it is scaled too
        params = self._params if turn is None else [(i, p) for i, p in self._params if its is None or i in its]
        if its is not None:
            # The others' gradients are dropped before they step, or were changed by this one's backward pass.
            self._pushed = {i: pushed for i, pushed in self._pushed.items() if i in its}
        if self._pushed:
            self._look(_unscaling_writes() if scaled and scale is None else None)
        if scaled and self._push is not _Push.LATE:
            self._push_at_step("a GradScaler scales the gradients")
        elif self._thrown and self._push is _Push.TRY and self._then is _Push.EARLY:
            self._push_at_step("the script threw gradients away between backward() and the first step()")
        elif self._twice and self._push is _Push.TRY and self._then is _Push.EARLY:
            self._push_at_step(
                "gradients came more than once in the first step, as those of a layer in several checkpoint(use_reentrant=True), or of several "
                "backward passes outside of run.no_sync()"
            )
        if scale is not None and not skips:
            inverse = 1.0 / float(scale)
            if given := [p.grad for i, p in params if p.grad is not None and i not in self._earlier]:
                torch._foreach_mul_(given, inverse)
            self.tables.scale(self.tables.of(turn), inverse)
        if self.tell_rates() and self._pushed and self.is_early:
            raise self._late_options("backward()", "change them behind the step or before backward(), or prepare(..., overlap=False)")
        if skips:
            self.tables.forget_of(self.tables.of(turn))
            self._session.skip()
            return []
        if self._freezing is None:
            if turn is not None:
                self._session.leave_out(self._classes_of_others(turn))
        else:
            if self._pushed and self.is_early:
                self._freezing.check()
            else:
                self._leave_groups(self._classes_of_others(turn))
            out = self._freezing.left_out()
            params = [(i, p) for i, p in params if i not in out] if out else params
        return self._gradients(params)

    def _leave_groups(self, others: list[int]) -> None:
        """Before a step's first gradient. ``others``: classes of optimizers that do not step.

        Raises:
            MisuseError: the servers cannot leave out a part.
        """
        if self._freezing is None:
            return
        out = self._freezing.begins(others)
        if out and self._norm_by_setting and self.run.mode != "bsp":
            raise MisuseError(
                f"clip_norm in mode {self.run.mode}: the servers wait for the whole gradient's norm, and this step leaves out parameters that are frozen, "
                "or another optimizer's. Have the script clip, by clip_grad_norm_()"
            )
        self._freezing.tells(self._session)

    @staticmethod
    def _late_options(since: str, remedy: str) -> MisuseError:
        return MisuseError(
            f"the optimizer's options, such as its learning rate, were changed between {since} and optimizer.step(), and gradients were pushed with the "
            f"earlier ones: {remedy}"
        )

    def _classes_of_others(self, turn: Turn) -> list[int]:
        """The classes of groups that no optimizer of this step has."""
        return [] if turn is None else sorted(set.intersection(*(set(self._parts[of][1]) for of in turn)))

    def _steps_with(self, turn: Turn) -> Optional[set[int]]:
        """The parameters that step; None: all."""
        return None if turn is None else set().union(*(self._parts[of][0] for of in turn))

    def tell_rates(self) -> bool:
        """Passes on the options that a scheduler has set since; whether there are any."""
        options, values = self._watch.changed(), self._clipping.values
        if options is None and values == self._clip_values:
            return False
        self._clip_values = dict(values)
        bounds = self._clipping.values_by_class() if values else [None] * len(self._watch.last)
        clips = [{} if bound is None else {"clip_value": bound} for bound in bounds]
        self._session.options([(rate, {**more, **clip}) for (rate, more), clip in zip(options or self._watch.last, clips)])
        return options is not None

    def _gradients(self, params: list[tuple[int, Any]]) -> list[tuple[int, int]]:
        if self._push is _Push.EARLY:
            params = [(i, p) for i, p in params if i not in self._pushed]
        flat, address = self.flat, self._address
        gradients = [(i, 0 if (gradient := p.grad) is None else address(i, gradient)) for i, p in reversed(params)]
        if flat.buffers:
            n = len(flat.params)
            with torch.no_grad():
                torch._foreach_copy_(self._moves, flat.views[n:])
                torch._foreach_sub_(self._moves, [b if b.is_cpu else b.cpu() for b in flat.statistics()])
            gradients += [(n + i, move.data_ptr()) for i, move in enumerate(self._moves)]
        return gradients

    def state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The state that torch's optimizer would have, from the servers."""
        if self._kept is not None:
            return self._kept
        if self.run._finished:
            _LOG.warning(
                "the optimizer's state was the servers', and the run is finished: state_dict() has options alone. Call it, or run.save(), "
                "before run.finish()"
            )
            return {}
        with tempfile.TemporaryDirectory(prefix="paraft-state-") as folder:
            now = opened(self.run._saved(folder))
        return {p: now.state_of(name) for p, name in zip(self.flat.params, self.flat.names)}

    def keep_state(self) -> None:
        """Keeps the state for queries after the end."""
        self._kept = self.state()

    def forget(self, optimizer: Optimizers) -> bool:
        """Removes the servers' state from an optimizer; returns whether it had any."""
        return any([one.state.pop(p, None) for one in each(optimizer) for p in self.flat.params])

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Options and state were loaded into the optimizer."""
        if self.forget(optimizer):
            _LOG.warning(
                "the state that was loaded into the optimizer is passed over: since run.prepare() it is the servers'. Load it before, or "
                "continue from a checkpoint of the job: paraft.init(resume=...)"
            )

    def _own_writes(self) -> None:
        """Detects weights that the script has written itself: the pull restores the servers'."""
        name = self.flat.written()
        if name is None:
            return
        self._undone += 1
        self._session.forget_weights()
        if not self._told:
            self._told = True
            _LOG.error(
                "`%s` was written to outside of optimizer.step(), as p.data.clamp_(), load_state_dict() and Embedding(max_norm=) do, and this step "
                "undoes it: the weights are the servers'. To have the servers bound weights, "
                "prepare(..., constraints={\"NAME\": paraft.clamp(...)}); to keep what the script writes, "
                "prepare(..., apply=\"worker\"); load weights before run.prepare(), or continue from a checkpoint with paraft.init(resume=...)",
                name,
            )

    def ends(self) -> None:
        """No step follows."""
        self.run._resume_wait()
        self.flat.follow_memory()
        self._own_writes()
        if self._undone:
            _LOG.error("what the script wrote to weights was undone by %d of %d steps, at least", self._undone, self.run.step)
        n = len(self.flat.params)
        for name, b, view in zip(self.flat.names[n:], self.flat.statistics(), self.flat.views[n:]):
            if not _holds(b, view) and not torch.equal(b.cpu(), view.to(b.dtype)):
                _LOG.warning(
                    "`%s` has moved since the last optimizer.step(), by forward passes or by the script, and run.finish() brings the mean of that "
                    "step: set such statistics (update_bn()) after run.finish()", name,
                )
                break

    def _look(self, unscaled: Optional[int]) -> None:
        """Whether gradients are as they were pushed or, at the first step, as the backward pass left them;
        ``unscaled``: a GradScaler has written to them, and torch counts it as this many writes."""
        for i, (gradient, version) in self._pushed.items():
            now, name = self.flat.params[i].grad, self.flat.names[i]
            if now is None:
                if self._push is _Push.EARLY:
                    raise MisuseError(
                        f"the gradient of `{name}` was thrown away (p.grad = None, zero_grad()) between its computation and optimizer.step(), and is "
                        "pushed already: prepare(..., overlap=False)"
                    )
                self._thrown = True
                continue
            same = now is gradient and (unscaled is not None or self._sums.get(i) in (None, _sum(now)))
            if same and (is_sharded(now) and unscaled or _stamp(now) == version + (unscaled or 0)):
                continue
            raise MisuseError(
                f"the gradient of `{name}` was changed between its computation and optimizer.step(), {self._remedy()} With "
                "prepare(..., overlap=False) what is there at step() is pushed: each worker's own gradient, changed before the mean, "
                "which is not DDP's result"
            )

    def _remedy(self) -> str:
        return (
            "as clip_grad_norm_ does. The servers average gradients first, so that clipping is theirs: prepare(..., clip_norm=1.0) (or "
            "clip_value=). In mode bsp the script may clip, and change the mean as it likes, with prepare(..., apply=\"mean\")."
        )

    def _push_at_step(self, why: str) -> None:
        if self._push is _Push.EARLY:
            raise MisuseError(f"{why}, and some are pushed already: prepare(..., overlap=False)")
        if self._asked:
            raise MisuseError(f"{why}: prepare(..., overlap=False)")
        self._looks_in = 0
        if self._then is _Push.EARLY:
            _LOG.info("%s: gradients are pushed by optimizer.step(), not during the backward pass", why)
        self._pushes(_Push.LATE)

    def _pushes(self, when: _Push) -> None:
        self._push = when
        if when is _Push.LATE:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def pulled(self) -> None:
        """The vector has new values."""
        flat = self.flat
        flat.spread()
        if flat.buffers:
            with torch.no_grad():
                moved = [(b.data, view) for b, view in zip(flat.statistics(), flat.views[len(flat.params) :]) if not _holds(b, view)]
                if moved:
                    torch._foreach_copy_([b for b, _ in moved], [view for _, view in moved])
        flat.mark()


def _refuse_others(front: Union[OnServers, OnWorker], prepared: Optimizers) -> Callable[..., None]:
    """Runs before each step of any optimizer: another one must not step weights that the servers train."""
    front_of, own = weakref.ref(front), weakref.WeakSet(each(prepared))
    names = {id(p): name for p, name in zip(front.flat.params, front.flat.names)}

    def before(stepping: torch.optim.Optimizer, *_: Any) -> None:
        now = front_of()
        if now is None or stepping in own or getattr(now, "inside", False):
            return
        name = next((names[id(p)] for group in stepping.param_groups for p in group["params"] if id(p) in names), None)
        if name is not None:
            raise MisuseError(
                f"another optimizer than that of run.prepare() steps `{name}`, which the servers train: they would undo it. Step the optimizer that "
                "was prepared; for another one save, and begin a run with it: paraft.init(resume=...); or prepare(..., apply=\"worker\")"
                if isinstance(now, OnServers)
                else f"another optimizer than that of run.prepare() steps `{name}`, and the workers' means are taken in optimizer.step() of the "
                "prepared one, which is not called (first_step() and second_step() of SAM: use its step(closure))"
            )

    return before


@functools.lru_cache(maxsize=None)
def _unscaling_writes() -> int:
    """How often ``GradScaler.unscale_`` writes to a gradient, by torch's own count."""
    gradient, zero = torch.ones(1, dtype=torch.float32, device="cpu"), torch.zeros(1, dtype=torch.float32, device="cpu")
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], zero, zero + 1)
    return gradient._version


class OnWorker:
    """The script's optimizer changes this worker's weights; the servers average the changes. ``turns``: steps in
    which each of several fragments has its turn. ``every``: steps after which the weights equal the servers'; 0:
    never."""

    def __init__(
        self, run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, settings: list[str], turns: int, every: int
    ) -> None:
        self.run = run
        self._every = every
        self._turns = turns
        self._steps = 0
        self._versions: list[int] = []
        self.flat = Flat(model, optimizer, run._group)
        resumes_elsewhere(run, model, self.flat, None)
        values = self.flat.values
        said = note(None, model, self.flat)
        vector = (self.flat.tensors, values.data_ptr(), values.numel(), values)
        self._session = join(run, model, self.flat, *vector, settings=settings, note=said)
        run._front = weakref.ref(self)
        self.flat.attach(buffers=True, shared=False)
        self.flat.spread()
        run._hooks.append(model.register_forward_pre_hook(Seen(run, self), with_kwargs=True))
        me = weakref.ref(self)

        def stepped(*_: Any) -> None:
            front = me()
            if front is not None:
                front.inside = False
                front.step()

        def steps(stepping: torch.optim.Optimizer, *_: Any) -> None:
            run._joined()
            run._resume_wait()
            front = me()
            if front is not None:
                front.inside = True
            if sum(len(g["params"]) for g in stepping.param_groups) != given:
                raise MisuseError(
                    "the optimizer's parameter groups were changed after run.prepare(): the workers' means are of the parameters that they had "
                    "then. For others save, and begin another run: paraft.init(resume=...)"
                )

        def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
            front = me()
            if front is not None:
                refuse_group(front, param_group)
            type(self).add_param_group(self, param_group)

        optimizer.add_param_group = types.MethodType(add_param_group, optimizer)  # type: ignore[method-assign]
        given = sum(len(g["params"]) for g in optimizer.param_groups)
        #: The prepared optimizer is in its ``step()``, which may step others, as Lookahead's does.
        self.inside = False
        run._hooks.append(register_optimizer_step_pre_hook(_refuse_others(self, optimizer)))
        run._hooks.append(_hear_losses(run, self.flat.params[0]))

        optimizer.register_step_pre_hook(steps)
        optimizer.register_step_post_hook(stepped)
        optimizer._paraft = self  # type: ignore[attr-defined]
        _with_skips(optimizer, self)

    def passes(self) -> None:
        """A forward pass begins."""

    def step(self) -> None:
        """The optimizer has made a step."""
        self._steps += 1
        self.flat.check()
        self.flat.gather()
        self.run._finish_step([])

    def ends(self) -> None:
        """No step follows. The script's later writes to weights go to the servers as one more step."""
        self.run._resume_wait()
        self.flat.follow_memory()
        self.flat.gather()
        if self._every and self._steps % self._every == 0 and not self.run._over and self._session.moved():
            self.step()
        rest = self._steps % self._turns
        if rest:
            _LOG.warning(
                "the loop ended %d steps behind the last turn of all fragments: what these moved in some of them is in nobody's weights but this "
                "worker's. Train a multiple of every=%d steps", rest, self._turns,
            )

    def unsaved(self) -> None:
        """The script saves: tells it of its own writes since the last step, which the servers do not have yet."""
        if self._every == 1 and self._versions != [p._version for p in self.flat.params]:
            self.flat.gather()
            if self._session.moved():
                _LOG.warning(
                    "weights were written since the last optimizer.step(): the checkpoint has the servers' weights of that step, without them. Save "
                    "behind the next step, or torch.save(model.state_dict(), ...)"
                )

    def pulled(self) -> None:
        """The vector has new values."""
        self.flat.spread()
        self._versions = [p._version for p in self.flat.params]


def _with_skips(optimizer: Any, front: OnWorker) -> None:
    """Makes a GradScaler report what it found, in place of skipping ``step()``, which the servers would not notice: a
    step whose gradients are not finite changes nothing, and counts."""
    inner: Callable[..., Any] = optimizer.step
    me = weakref.ref(front)

    @functools.wraps(inner)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__}
        found_inf, scale, now = given.get("found_inf"), given.get("grad_scale"), me()
        if now is not None and found_inf is not None:
            now.run._heard = math.nan  # it is scaled too
        try:
            if now is not None and found_inf is not None and float(found_inf) != 0.0:
                return now.step()
            if scale is not None:
                gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
                torch._foreach_mul_(gradients, 1.0 / float(scale))
            done = inner(*args, **kwargs)
        except BaseException:
            given.clear()  # a GradScaler may take them back only after a step
            raise
        finally:
            self.__dict__.update(given)
        return done

    optimizer.step = types.MethodType(step, optimizer)
    optimizer._step_supports_amp_scaling = True


def refuse_group(front: Union[OnServers, OnWorker], group: Mapping[str, Any]) -> None:
    """Runs before a script adds a parameter group.

    Raises:
        MisuseError: the run trains.
    """
    if front.run._session is None:
        return
    given = group["params"]
    first = next(iter([given] if isinstance(given, torch.Tensor) else list(given)), None)
    name = front.flat.name_of(first[1] if isinstance(first, tuple) else first)
    raise MisuseError(
        f"a parameter group{f' with `{name}`' if name else ''} was added after run.prepare(), and the servers have the parameters that the optimizer had "
        "then. "
        + ("Give it this group before, frozen; it begins to train with requires_grad_(True). " if front.flat.freezes else "")
        + "Or run.save(), and continue with a new run and resume="
    )


def _blank(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer whose state is set later."""
    return kind.__new__(kind)


def stepping(kind: Any, **own: Any) -> type[torch.optim.Optimizer]:
    """The class of an optimizer whose ``step()`` is the run's, with these methods too."""

    def step(self: Any, closure: Optional[Callable[[], Any]] = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        front = getattr(self, "_paraft", None)
        if front is None:
            raise MisuseError("this optimizer is no run's: it was made by the class of one that is; call run.prepare() with torch's own")
        try:
            of = getattr(self, "_paraft_place", None)
            given = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
            front.step(*given) if of is None else front.step(*given, of)
        except BaseException:
            for name in ("found_inf", "grad_scale"):
                self.__dict__.pop(name, None)  # a GradScaler may take them back only after a step
            raise
        return loss

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # A copy is a plain torch optimizer, and trains its own weights.
        return _blank, (kind,), self.__getstate__()

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        front = getattr(self, "_paraft", None)
        if front is not None:
            refuse_group(front, param_group)
        kind.add_param_group(self, param_group)

    own = {"step": step, "add_param_group": add_param_group, "__reduce_ex__": __reduce_ex__, **own}
    return type(kind.__name__, (kind,), {**own, "__module__": kind.__module__, "__doc__": kind.__doc__})


@functools.lru_cache(maxsize=None)
def servers(kind: Any) -> type[torch.optim.Optimizer]:
    """The class of an optimizer that the servers run."""

    def state_dict(self: Any) -> Any:
        # The original class creates the copy.
        own = {id(p) for group in self.param_groups for p in group["params"]}
        self.state.update((p, entry) for p, entry in self._paraft.state().items() if entry and id(p) in own)
        try:
            return kind.state_dict(self)
        finally:
            self._paraft.forget(self)

    def load_state_dict(self: Any, state_dict: Any) -> None:
        kind.load_state_dict(self, state_dict)
        self._paraft.loaded(self)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.zero_grad(self, *args, **kwargs)
        place, rows = getattr(self, "_paraft_place", None), self._paraft.tables
        rows.forget_of(rows.of(None if place is None else [place]))

    return stepping(kind, state_dict=state_dict, load_state_dict=load_state_dict, zero_grad=zero_grad)


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Checks that ``step()`` is the class's, or a scheduler's wrapper of it.

    Raises:
        ConfigError: it is the script's own.
    """
    step = optimizer.__dict__.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ConfigError(
            "optimizer.step was replaced by a function of the script's own, which the servers' step would not call: use "
            "optimizer.register_step_post_hook(), replace it behind run.prepare(), or prepare(..., apply=\"worker\")"
        )


def take_over(
    optimizer: Any, front: OnServers, kind: Callable[[Any], type[torch.optim.Optimizer]], place: Optional[int] = None
) -> None:
    """Makes ``optimizer.step()`` the run's. The object stays the same for schedulers and scalers; ``kind``: makes its
    new class; ``place``: its place among several."""
    by_scheduler = optimizer.__dict__.pop("step", None)
    optimizer.__class__ = kind(type(optimizer))
    optimizer._patch_step_function()
    optimizer._paraft = front
    if place is not None:
        optimizer._paraft_place = place
    if front.must_skip:
        # A GradScaler then reports what it found, and does not skip the step on its own.
        optimizer._step_supports_amp_scaling = True
    if front.run.step:
        optimizer._opt_called = True  # a scheduler may advance at once
    if by_scheduler is not None:
        # A scheduler created before checks whether the optimizer has stepped.
        owner: Callable[[], Any] = weakref.ref(optimizer)

        def tracked(*args: Any, **kwargs: Any) -> Any:
            own = owner()
            own._opt_called = True
            return type(own).step(own, *args, **kwargs)

        tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = tracked
