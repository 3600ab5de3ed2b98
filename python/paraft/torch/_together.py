"""Several optimizers, or several models, in one run: as of a GAN, or of actor and critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

import torch

Models = Union[torch.nn.Module, Sequence[torch.nn.Module], Mapping[str, torch.nn.Module]]


class Together:
    """Several optimizers as one: the groups of all, in order. Each steps by itself."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.all = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all."""
        return [group for optimizer in self.all for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of all, by parameter."""
        return {p: entry for optimizer in self.all for p, entry in optimizer.state.items()}


#: What the servers run.
Optimizers = Union[torch.optim.Optimizer, Together]


def each(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """The optimizers."""
    return optimizer.all if isinstance(optimizer, Together) else [optimizer]


def owners(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """The optimizer of each parameter group."""
    return [one for one in each(optimizer) for _ in one.param_groups]


def one_module(models: Any) -> Any:
    """Several models as one module."""
    if isinstance(models, Mapping):
        return torch.nn.ModuleDict(models)
    if isinstance(models, (list, tuple)):
        return torch.nn.ModuleList(models)
    return models


def heads(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules that a script calls: the model itself, or what a container of several ones holds."""
    if isinstance(model, (torch.nn.ModuleDict, torch.nn.ModuleList)):
        for child in model.children():
            yield from heads(child)
    else:
        yield model
