"""How a model and its optimizers join a job: :func:`paraft.torch.prepare`, and local steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import torch

from .._constraints import Constraint
from .._run import Run, push_settings, toml
from ..errors import ConfigError, MisuseError
from . import _accelerated, _optim
from ._flat import is_sharded
from ._mean import OnMean, means, refusal
from ._state import State
from ._steps import OnServers, OnWorker, check_step, servers, take_over
from ._together import Models, Together, each, one_module

_LOG = logging.getLogger("paraft")


def prepare(
    run: Run,
    model: Models,
    optimizer: Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer]],
    apply: str,
    clip_norm: Optional[float],
    clip_value: Optional[float],
    overlap: Optional[bool],
    encoding: str,
    constraints: Optional[Mapping[str, Constraint]],
) -> None:
    """See :func:`paraft.torch.prepare`."""
    settings = push_settings(encoding, clip_norm, clip_value)
    whole: torch.nn.Module = one_module(model)
    if isinstance(optimizer, Sequence):
        _several(run, whole, optimizer, apply, overlap)
        together = Together([_inner(one) for one in optimizer])
        _on_servers(run, whole, together, overlap, settings, constraints)
    elif not _one(run, whole, _inner(optimizer), apply, overlap, settings, constraints):
        if clip_norm is not None or clip_value is not None:
            raise ConfigError("clip_norm and clip_value are the servers'; with apply=\"worker\" the script clips, before optimizer.step()")
        if constraints:
            raise ConfigError("constraints are the servers'; with apply=\"worker\" what the script writes to weights counts: clamp them there")
        local(run, whole, _inner(optimizer), every=1, outer={"kind": "sgd", "lr": 1.0}, encoding=encoding)
    for one in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        _accelerated.follow(run, one)


def _one(
    run: Run,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    apply: str,
    overlap: Optional[bool],
    settings: list[str],
    constraints: Optional[Mapping[str, Constraint]],
) -> bool:
    """Prepares an optimizer that runs on the servers, or on the mean; whether it is not to run on the worker alone."""
    _new(run, optimizer)
    _grouped(run, model, overlap)
    if apply not in ("auto", "servers", "mean", "worker"):
        raise ConfigError(f"apply is {apply!r}; it is \"servers\", \"mean\", \"worker\" or \"auto\"")
    if apply == "worker":
        return False
    if apply == "mean":
        state = refusal(run, optimizer, bool(constraints))
        if isinstance(state, str):
            raise ConfigError(f"apply=\"mean\": {state}")
        _mean(run, model, optimizer, state, overlap, settings)
        return True
    try:
        _optim.tables(optimizer)
    except _optim.Unmapped as why:
        if apply == "servers":
            raise ConfigError(f"{why}; or prepare(..., apply=\"worker\")") from None
        state = refusal(run, optimizer, bool(constraints))
        if isinstance(state, str):
            _LOG.warning(
                "%s: it runs on each worker, and the servers average how far the weights went (apply=\"worker\"). That is not DDP's "
                "result, where the optimizer is given the mean gradient. It is not apply=\"mean\" because %s",
                why, state,
            )
            return False
        _LOG.info("%s: it runs on each worker, on the mean gradient (apply=\"mean\")", why)
        _mean(run, model, optimizer, state, overlap, settings)
    else:
        _on_servers(run, model, optimizer, overlap, settings, constraints)
    return True


def _on_servers(
    run: Run,
    model: torch.nn.Module,
    optimizer: Union[torch.optim.Optimizer, Together],
    overlap: Optional[bool],
    settings: list[str],
    constraints: Optional[Mapping[str, Constraint]],
) -> None:
    for one in each(optimizer):
        check_step(one)
    settings = [f"optimizer={toml(_optim.table(optimizer))}", *settings]
    with torch.inference_mode(False):  # tensors created in inference mode cannot be trained
        front = OnServers(run, model, optimizer, overlap=overlap, settings=settings, constraints=constraints or {})
    for place, one in enumerate(each(optimizer)):
        take_over(one, front, servers, place if isinstance(optimizer, Together) else None)


def _several(run: Run, model: torch.nn.Module, optimizers: Sequence[Any], apply: str, overlap: Optional[bool]) -> None:
    """Checks that the servers can run several optimizers.

    Raises:
        ConfigError: they cannot.
    """
    if not optimizers:
        raise ConfigError("the list of optimizers is empty")
    for optimizer in optimizers:
        _new(run, _inner(optimizer))
    if len(set(map(id, optimizers))) < len(optimizers):
        raise ConfigError("the list has an optimizer twice")
    if apply not in ("auto", "servers"):
        raise ConfigError(f"several optimizers run on the servers: apply is \"servers\" or \"auto\", and not {apply!r}")
    if overlap:
        raise ConfigError("overlap=True: with several optimizers each pushes its gradients in its step()")
    if run._group is not None:
        raise ConfigError("the ranks of a group train with one optimizer: for several ones make each rank a worker")
    if run._leased:
        raise ConfigError("leased data: a batch is one step of one optimizer; with several ones take DistributedSampler")
    try:
        _optim.tables(Together([_inner(one) for one in optimizers]))
    except _optim.Unmapped as e:
        raise ConfigError(f"several optimizers run on the servers, and of these {e}") from None
    _grouped(run, model, overlap)


def _mean(
    run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: State, overlap: Optional[bool], settings: list[str]
) -> None:
    rate = optimizer.param_groups[0].get("lr", 0.0)
    # The servers apply no rule; the rate is for the record.
    settings = [f"optimizer={toml({'kind': 'sgd', 'lr': float(rate)})}", *settings]
    with torch.inference_mode(False):
        front = OnMean(run, model, optimizer, state=state, overlap=overlap, settings=settings)
    take_over(optimizer, front, means)


def _grouped(run: Run, model: torch.nn.Module, overlap: Optional[bool]) -> None:
    """Checks that group and model fit together.

    Raises:
        ConfigError: they do not fit.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError("the model is a ScriptModule (torch.jit.script), which takes no hooks: give prepare() the module it was made of")
    averages = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    if run._group is None:
        if averages:
            raise ConfigError(
                "DistributedDataParallel averages the gradients already, and the servers would once more: give prepare() the model "
                "itself; where the ranks of a host are one worker, paraft.init(group=...) with DDP's process group"
            )
        return
    if not averages and not any(is_sharded(p) for p in model.parameters()):
        raise ConfigError(
            "torch averages the gradients of a group's ranks: prepare(DDP(model, process_group=...), ...), or fully_shard(model, mesh=...) before"
        )
    if overlap:
        raise ConfigError("in a group gradients are pushed by step(), when all ranks have them: no overlap=True")


def _inner(optimizer: Any) -> Any:
    """The optimizer inside of a wrapper that is one by name alone, as Accelerate's, whose ``step()`` is the inner one's."""
    inner = getattr(optimizer, "optimizer", None)
    wraps = isinstance(inner, torch.optim.Optimizer) and isinstance(optimizer, torch.optim.Optimizer)
    return inner if wraps and not hasattr(optimizer, "_optimizer_step_pre_hooks") else optimizer


def _new(run: Run, optimizer: torch.optim.Optimizer) -> None:
    run.check_new()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"the optimizer is a {type(optimizer).__name__}, and not a torch.optim.Optimizer, nor a list of them"
        )
    if hasattr(optimizer, "_paraft"):
        raise MisuseError("this optimizer is another run's: make one for each")


def local(
    run: Run,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    every: int,
    outer: dict[str, Any],
    encoding: str = "f32",
    fragments: int = 1,
) -> OnWorker:
    """Joins the job with an optimizer that changes this worker's own weights. It pushes their change after every
    ``every`` steps."""
    _new(run, optimizer)
    _grouped(run, model, None)
    if run._leased:
        raise ConfigError("leased data goes with the servers' optimizer, and not with local steps or apply=\"worker\": take DistributedSampler")
    rule = {"steps": every, "fragments": fragments, "outer": outer}
    settings = [f"local={toml(rule)}", *push_settings(encoding, None, None)]
    whole = fragments == 1
    with torch.inference_mode(False):
        return OnWorker(run, model, optimizer, settings=settings, turns=1 if whole else every, every=every if whole else 0)
