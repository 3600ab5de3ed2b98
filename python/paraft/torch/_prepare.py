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
from ._state import States
from ._steps import OnServers, OnWorker, check_step, servers, take_over
from ._tables import TableOptimizer, Tables
from ._together import Models, Optimizers, Together, each, one_module

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
    _check_tables(run, whole, optimizer, apply)
    prepared: Any = _several(run, optimizer, overlap) if isinstance(optimizer, Sequence) else _inner(optimizer)
    if isinstance(prepared, TableOptimizer):
        if not Tables(run, whole).all:
            raise ConfigError("the optimizer is a TableOptimizer, and the model has no table")
        whole = torch.nn.ModuleDict({"model": whole, "tables": prepared.holder})
    if not _on_all(run, whole, prepared, apply, overlap, settings, constraints):
        if clip_norm is not None or clip_value is not None:
            raise ConfigError("clip_norm and clip_value are the servers'; with apply=\"worker\" the script clips, before optimizer.step()")
        if constraints:
            raise ConfigError("constraints are the servers'; with apply=\"worker\" what the script writes to weights counts: clamp them there")
        local(run, whole, prepared, every=1, outer={"kind": "sgd", "lr": 1.0}, encoding=encoding)
    for one in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        _accelerated.follow(run, one)


def _check_tables(run: Run, model: torch.nn.Module, optimizer: Any, apply: str) -> None:
    """Checks that the run can have the model's tables.

    Raises:
        ConfigError: it cannot.
    """
    tables = Tables(run, model).all
    if not tables:
        return
    name = tables[0].name
    if apply not in ("auto", "servers"):
        raise ConfigError(f"table `{name}` is on the servers: with tables apply is \"servers\" or \"auto\", and not {apply!r}")
    if run._group is not None:
        raise ConfigError(f"table `{name}`: the ranks of a group share no rows; make each rank a worker")
    all_of = [_inner(one) for one in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    for one in all_of:
        _new(run, one)
    try:
        _optim.tables(Together(all_of))
    except _optim.Unmapped as why:
        raise ConfigError(f"table `{name}` is on the servers, and with it the optimizer of the other weights: {why}") from None


def _on_all(
    run: Run,
    model: torch.nn.Module,
    optimizer: Optimizers,
    apply: str,
    overlap: Optional[bool],
    settings: list[str],
    constraints: Optional[Mapping[str, Constraint]],
) -> bool:
    """Prepares optimizers that run on the servers, or on the mean; whether they are not to run on the worker alone."""
    for one in each(optimizer):
        _new(run, one)
    _grouped(run, model, overlap)
    several = isinstance(optimizer, Together)
    if apply not in ("auto", "servers", "mean", "worker"):
        raise ConfigError(f"apply is {apply!r}; it is \"servers\", \"mean\", \"worker\" or \"auto\"")
    if apply == "worker":
        if several:
            raise ConfigError("several optimizers run on the servers, or in mode bsp on the mean: apply cannot be \"worker\"")
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
            other = "mean" if several else "worker"
            raise ConfigError(f"{why}; or prepare(..., apply=\"{other}\")") from None
        state = refusal(run, optimizer, bool(constraints))
        if isinstance(state, str) and several:
            raise ConfigError(f"{why}; and these optimizers cannot run on the mean (apply=\"mean\"): {state}") from None
        if isinstance(state, str):
            _LOG.warning(
                "%s: it runs on each worker, and the servers average how far the weights went (apply=\"worker\"). That is not DDP's "
                "result, where the optimizer is given the mean gradient. It is not apply=\"mean\" because %s",
                why, state,
            )
            return False
        _LOG.info("%s: %s on each worker, on the mean gradient (apply=\"mean\")", why, "all run" if several else "it runs")
        _mean(run, model, optimizer, state, overlap, settings)
    else:
        _on_servers(run, model, optimizer, overlap, settings, constraints)
    return True


def _on_servers(
    run: Run,
    model: torch.nn.Module,
    optimizer: Optimizers,
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


def _several(run: Run, optimizers: Sequence[Any], overlap: Optional[bool]) -> Together:
    """Several optimizers as one.

    Raises:
        ConfigError: they cannot be in one run.
    """
    if not optimizers:
        raise ConfigError("the list of optimizers is empty")
    if len(set(map(id, optimizers))) < len(optimizers):
        raise ConfigError("the list has an optimizer twice")
    if overlap:
        raise ConfigError("overlap=True: with several optimizers each pushes its gradients in its step()")
    if run._group is not None:
        raise ConfigError("the ranks of a group train with one optimizer: for several ones make each rank a worker")
    if run._leased:
        raise ConfigError("leased data: a batch is one step of one optimizer; with several ones take DistributedSampler")
    return Together([_inner(one) for one in optimizers])


def _mean(
    run: Run, model: torch.nn.Module, optimizer: Optimizers, state: States, overlap: Optional[bool], settings: list[str]
) -> None:
    several = isinstance(optimizer, Together)
    if several and any(line.startswith("clip.norm") for line in settings):
        raise ConfigError(
            "clip_norm: with several optimizers on the mean (apply=\"mean\") the script clips, behind backward(): clip_grad_norm_(parameters, ...)"
        )
    rate = optimizer.param_groups[0].get("lr", 0.0)
    # The servers apply no rule; the rate is for the record.
    settings = [f"optimizer={toml({'kind': 'sgd', 'lr': float(rate)})}", *settings]
    with torch.inference_mode(False):
        front = OnMean(run, model, optimizer, state=state, overlap=overlap, settings=settings)
    for place, one in enumerate(each(optimizer)):
        take_over(one, front, means, place if several else None)


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
    if tables := Tables(run, model).all:
        raise ConfigError(f"table `{tables[0].name}` is on the servers, and local steps are not: train with run.prepare()")
    _grouped(run, model, None)
    if run._leased:
        raise ConfigError("leased data goes with the servers' optimizer, and not with local steps or apply=\"worker\": take DistributedSampler")
    rule = {"steps": every, "fragments": fragments, "outer": outer}
    settings = [f"local={toml(rule)}", *push_settings(encoding, None, None)]
    whole = fragments == 1
    with torch.inference_mode(False):
        return OnWorker(run, model, optimizer, settings=settings, turns=1 if whole else every, every=every if whole else 0)
