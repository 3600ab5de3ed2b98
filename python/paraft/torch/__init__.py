"""PyTorch models in a job: see :func:`prepare`, which ``run.prepare(model, optimizer)`` calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Optional, TypeVar, Union

import torch

from .._constraints import Constraint
from .._run import Run, push_settings, toml
from ..errors import ConfigError, MisuseError
from . import _release  # noqa: F401  (first: it checks torch's release)
from . import _accelerated, _optim
from ._checkpoints import export_dcp, load_checkpoint
from ._flat import is_sharded
from ._leased import LeasedLoader, LeasedSampler
from ._mean import OnMean, means, refusal
from ._state import State
from ._steps import OnServers, OnWorker, check_step, servers, take_over
from ._tables import Embedding, EmbeddingBag, Table, Tables
from ._together import Models, Together, each, one_module

__all__ = [
    "DiLoCo",
    "Embedding",
    "EmbeddingBag",
    "LeasedLoader",
    "LeasedSampler",
    "LocalSGD",
    "Table",
    "export_dcp",
    "load_checkpoint",
    "prepare",
]

_LOG = logging.getLogger("paraft")

_M = TypeVar("_M", bound=Models)
_O = TypeVar("_O", bound=Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer]])


def prepare(
    run: Run,
    model: _M,
    optimizer: _O,
    *,
    apply: str = "auto",
    clip_norm: Optional[float] = None,
    clip_value: Optional[float] = None,
    overlap: Optional[bool] = None,
    encoding: str = "f32",
    constraints: Optional[Mapping[str, Constraint]] = None,
) -> tuple[_M, _O]:
    """Joins the job with this model; waits until all its workers have joined. Returns the same two objects, ready to
    train.

    Worker 0's weights become the job's initial weights, as with DDP, and so does its optimizer's state (call
    ``load_state_dict()`` before). Afterwards ``optimizer.step()`` pushes gradients, waits as the job's mode requires,
    and pulls; ``optimizer.state_dict()`` asks the servers.

    Several optimizers, as of a GAN, train in one run, each with steps of its own, in the same order on all workers::

        models, (opt_g, opt_d) = run.prepare({"g": generator, "d": discriminator}, [opt_g, opt_d])

    Args:
        model: a module, or a list or dict of them.
        optimizer: an optimizer, or a list of them, which have different parameters. The servers run all of a list.
        apply: which side runs the optimizer. ``"servers"``: the servers, with the rules of ``optimizer`` (SGD,
            Adagrad, RMSprop, Adadelta, Adam, AdamW, Adamax, NAdam, RAdam), and they keep its state. ``"mean"``: the
            servers average the gradients, and each worker runs ``optimizer``, of any class, on the mean; the servers
            keep its state. Only in mode ``bsp``. ``"worker"``: ``optimizer`` itself, of any class, and the servers
            average the workers' weight changes. ``"auto"``: the servers if they can, else the mean if it is possible,
            else the worker, which is logged.
        clip_norm: clips gradients by their norm, like ``clip_grad_norm_`` under DDP: in lock-step the norm of the
            mean.
        clip_value: clips each value of a gradient to at most this size.
        overlap: push gradients during the backward pass. Default: for models from 4 MiB. ``False``: ``step()`` pushes
            the present gradients.
        encoding: the encoding of gradients: ``f32``, ``bf16``, ``fp16``, ``int8``, ... (``train.encoding``).
        constraints: constraints that the servers apply to the initial parameters and after each step: ``{"critic.*":
            paraft.clamp(-0.01, 0.01)}``. By parameter name; ``*`` matches any characters.

    Raises:
        ConfigError: the servers cannot run this optimizer, or the model cannot be trained this way.
        UnavailableError: the servers cannot be reached.
    """
    settings = push_settings(encoding, clip_norm, clip_value)
    whole: torch.nn.Module = one_module(model)
    _check_tables(run, whole, optimizer, apply)
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
    return model, optimizer


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
    if isinstance(optimizer, Sequence):
        raise ConfigError(f"table `{name}` trains in each step: with tables prepare one optimizer")
    if run._group is not None:
        raise ConfigError(f"table `{name}`: the ranks of a group share no rows; make each rank a worker")
    _new(run, _inner(optimizer))
    try:
        _optim.tables(_inner(optimizer))
    except _optim.Unmapped as why:
        raise ConfigError(f"table `{name}` is on the servers, and with it the optimizer of the other weights: {why}") from None


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


class DiLoCo:
    """Local steps with an outer optimizer: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023;
    with ``fragments`` *Streaming DiLoCo*, Douillard et al. 2025::

        with paraft.torch.DiLoCo(run, model, optimizer, every=50):
            for x, y in loader:
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    Any torch optimizer can be the inner one; its state is this worker's own, and is lost with it. Hooks and
    schedulers of ``optimizer.step()`` count the steps.

    Args:
        run: of :func:`paraft.init`, not prepared.
        model: the model.
        optimizer: the inner optimizer.
        every: steps between two pushes, 1 to 1,000,000.
        outer: the servers' optimizer, as an ``[optimizer]`` table. Default: Nesterov with rate 0.7 and momentum 0.9.
        fragments: parts of the model that are pushed and pulled in turn.
        encoding: the encoding of pushes.

    Raises:
        ConfigError: the options contradict each other.
    """

    def __init__(
        self,
        run: Run,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 50,
        outer: Optional[dict[str, Any]] = None,
        fragments: int = 1,
        encoding: str = "f32",
    ) -> None:
        self.run = run
        outer = outer or {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}
        self._front = local(run, model, optimizer, every=every, outer=outer, fragments=fragments, encoding=encoding)

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], e: Optional[BaseException], at: Optional[TracebackType]
    ) -> None:
        self.run.__exit__(kind, e, at)


class LocalSGD(DiLoCo):
    """Local steps with averaged results: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. Like
    :class:`DiLoCo`, but the servers' weights become the mean of the workers'."""

    def __init__(
        self,
        run: Run,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 8,
        encoding: str = "f32",
    ) -> None:
        super().__init__(run, model, optimizer, every=every, outer={"kind": "sgd", "lr": 1.0}, encoding=encoding)
