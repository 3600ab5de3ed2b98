"""PyTorch models in a job: see :func:`prepare`, which ``run.prepare(model, optimizer)`` calls.

What trains is imported by the first :func:`prepare`: an import of this module takes little time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional, TypeVar, Union

import torch

from .._run import Run
from . import _release  # noqa: F401  (first: it checks torch's release)
from ._leased import LeasedLoader, LeasedSampler

if TYPE_CHECKING:
    from .._constraints import Constraint
    from ._checkpoints import export_dcp, load_checkpoint
    from ._tables import Embedding, EmbeddingBag, Table, TableOptimizer
    from ._together import Models

__all__ = [
    "DiLoCo",
    "Embedding",
    "EmbeddingBag",
    "LeasedLoader",
    "LeasedSampler",
    "LocalSGD",
    "Table",
    "TableOptimizer",
    "export_dcp",
    "load_checkpoint",
    "prepare",
]

_M = TypeVar("_M", bound="Models")
_O = TypeVar("_O", bound=Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer]])


def __getattr__(name: str) -> Any:
    if name in ("export_dcp", "load_checkpoint"):
        from . import _checkpoints

        return getattr(_checkpoints, name)
    if name in ("Embedding", "EmbeddingBag", "Table", "TableOptimizer"):
        from . import _tables

        return getattr(_tables, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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

    Where the servers run the optimizer, the script may freeze and unfreeze whole parameter groups between two steps, on all
    workers at the same ``run.step``. The servers hold a group that is frozen at first too: leave it out of the optimizer if it
    stays so.

    Several optimizers, as of a GAN, train in one run, each with steps of its own, in the same order on all workers::

        models, (opt_g, opt_d) = run.prepare({"g": generator, "d": discriminator}, [opt_g, opt_d])

    Args:
        model: a module, or a list or dict of them.
        optimizer: an optimizer, or a list of them, which have different parameters; for a model that trains tables alone a
            :class:`TableOptimizer`. All of a list run in the same place; with
            ``apply="mean"`` those that step after one backward pass are one step of the run.
        apply: which side runs the optimizer. ``"servers"``: the servers, with the rules of ``optimizer`` (SGD,
            Adagrad, RMSprop, Adadelta, Adam, AdamW, Adamax, NAdam, RAdam), and they keep its state. ``"mean"``: the
            servers average the gradients, and each worker runs ``optimizer``, of any class, on the mean; the servers
            keep its state. Only in mode ``bsp``. ``"worker"``: ``optimizer`` itself, of any class, and the servers
            average the workers' weight changes. ``"auto"``: the servers if they can, else the mean if it is possible,
            else the worker, which is logged.
        clip_norm: clips gradients by their norm, like ``clip_grad_norm_`` under DDP: in lock-step the norm of the
            mean.
        clip_value: clips each value of a gradient to at most this size. Not with tables.
        overlap: push gradients during the backward pass. Default: for models from 4 MiB. ``False``: ``step()`` pushes
            the present gradients.
        encoding: the encoding of gradients: ``f32``, ``bf16``, ``fp16``, ``int8``, ... (``train.encoding``).
        constraints: constraints that the servers apply to the initial parameters and after each step: ``{"critic.*":
            paraft.clamp(-0.01, 0.01)}``. By parameter name; ``*`` matches any characters.

    Raises:
        ConfigError: the servers cannot run this optimizer, or the model cannot be trained this way.
        UnavailableError: the servers cannot be reached.
    """
    from ._prepare import prepare

    prepare(run, model, optimizer, apply, clip_norm, clip_value, overlap, encoding, constraints)
    return model, optimizer


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
        from ._prepare import local

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
