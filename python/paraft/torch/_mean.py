"""``apply="mean"``: the servers average the gradients, and every worker runs the script's optimizer on the mean.

All workers compute the same weights and the same state of the optimizer, bit by bit. Each writes a share of both to the
servers, so that a worker that joins or comes back, and a checkpoint, have them.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Union

import torch

from .. import _paraft
from .._run import Run
from ..errors import ConfigError, MisuseError
from ._checkpoints import note
from ._flat import Flat
from ._state import State, Uncarried, own_step
from ._steps import OnServers, check_step, stepping


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
    said = f"python mean {kind.__module__}.{kind.__qualname__} torch {torch.__version__} {device.type} {on}"
    return said.replace(",", " ")


class OnMean(OnServers):
    """The servers average gradients, and this worker's optimizer makes the step."""

    def __init__(self, run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, state: State, **options: Any) -> None:
        self._state = state
        self._optimizer = optimizer
        self._inner = own_step(type(optimizer))
        #: The optimizer is in its own step.
        self.inside = False
        self._rate: Optional[float] = None
        #: The run's moves to another step so far, and the step whose results are this worker's own.
        self._moves_known, self._own = 0, -1
        super().__init__(run, model, optimizer, constraints={}, **options)

    def _flat(self, model: torch.nn.Module, optimizer: Any) -> Flat:
        return Flat(model, optimizer, None, self._state.values)

    def _join(self, model: torch.nn.Module, optimizer: Any, settings: list[str]) -> Any:
        run, flat = self.run, self.flat
        self._state.gather(flat.state)
        return run._join(
            flat.tensors,
            flat.values.data_ptr(),
            flat.values.numel(),
            flat.values,
            settings=settings,
            results=flat.results,
            data=_code(optimizer),
            note=note(None, model, flat),
        )

    def step(self, found_inf: Optional[torch.Tensor], scale: Optional[torch.Tensor], of: Optional[int] = None) -> None:
        """Pushes the gradients and waits for their mean, on which :meth:`pulled` runs the optimizer."""
        if not self.run._waits and self.run._joined().applies() is not None:
            raise MisuseError(
                "an earlier optimizer.step() was interrupted while it changed the weights, which are no longer the other workers': end this "
                "process; another one may take its place"
            )
        super().step(found_inf, scale, of)

    def tell_rates(self) -> None:
        """Passes on the first group's rate, for the record."""
        rate = self._optimizer.param_groups[0].get("lr")
        if rate is not None and float(rate) != self._rate and float(rate) >= 0:
            self._rate = float(rate)
            self._session.rates([self._rate])

    def _own_writes(self) -> None:
        name = self.flat.written()
        if name is not None:
            raise MisuseError(
                f"`{name}` was written to outside of optimizer.step(), as p.data.clamp_(), load_state_dict() and Embedding(max_norm=) do: a worker "
                "that joins would have other weights than this one. Write it inside of the optimizer's step(), load weights before "
                "run.prepare(), or prepare(..., apply=\"worker\")"
            )

    def pulled(self) -> None:
        """The vector has new values: the mean gradient, or everything."""
        run = self.run
        applies = self._session.applies() if hasattr(self, "_session") and not run._finished and run._session is not None else None
        if applies is None:
            # Otherwise what the pull brought is not what this worker has computed.
            if self._moves_known != run._moves or self._own != run._step or run._finished:
                self._moves_known, self._own = run._moves, run._step
                self._state.restore(self.flat.state)
                self.flat.spread()
            super().pulled()
            return
        if applies:
            self._apply()
            self.flat.gather()
            self.flat.round()
            self._state.gather(self.flat.state)
        self._own = run._step + 1
        run._waited(lambda session: session.applied())

    @torch.no_grad()
    def _apply(self) -> None:
        for p, mean in zip(self.flat.params, self.flat.means):
            if p.grad is None:
                p.grad = torch.empty_like(p)
        torch._foreach_copy_([p.grad for p in self.flat.params if p.grad is not None], self.flat.means)
        self.inside = True
        try:
            with torch.enable_grad():
                self._inner(self._optimizer)
        finally:
            self.inside = False

    def state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The optimizer has its state itself."""
        return {}

    def keep_state(self) -> None:
        """The optimizer keeps its state."""

    def ends(self) -> None:
        """No step follows."""
        self.run._resume_wait()
        self.flat.follow_memory()
        super()._own_writes()


@functools.lru_cache(maxsize=None)
def means(kind: Any) -> type[torch.optim.Optimizer]:
    """The class of an optimizer that runs on the mean gradient."""

    def load_state_dict(self: Any, state_dict: Any) -> None:
        raise MisuseError("the optimizer's state is the same on all workers since run.prepare(): load it before, or paraft.init(resume=...)")

    return stepping(kind, load_state_dict=load_state_dict)
