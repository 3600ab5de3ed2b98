"""Names of a model's tensors: the model's own, regardless of wrappers around it or its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: Attributes by which wrappers hold the wrapped module: of ``torch.compile``, FSDP, and activation checkpointing.
_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
#: Wrappers whose attribute is a name that models use too.
_BY_TYPE = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


class Names:
    """Maps each tensor of a model to its name on the servers and in checkpoints.

    A tensor with several names in the model has its first one, as in ``named_parameters()``.

    Attributes:
        aliases: the other names, each with the first.
        wrapped: the full names of tensors whose names wrappers have changed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._dropped: set[str] = set()
        for path, module in model.named_modules(remove_duplicate=False):
            inner = [name for name in _INNER if name in module._modules]
            if isinstance(module, _BY_TYPE):
                inner.append("module")
            self._dropped.update(f"{path}.{name}" if path else name for name in inner)
        self._of: dict[int, str] = {}
        self.aliases: dict[str, str] = {}
        self.wrapped: dict[str, str] = {}
        self._first: dict[str, int] = {}
        for name, t in _tensors(model):
            plain = self.plain(name)
            if self._first.setdefault(plain, id(t)) != id(t):
                plain = name  # the model itself uses that name
                self._first[plain] = id(t)
            if plain != name:
                self.wrapped[plain] = name
            first = self._of.setdefault(id(t), plain)
            if first != plain:
                self.aliases[plain] = first

    def plain(self, name: str) -> str:
        """A name without the wrappers' parts."""
        if not self._dropped:
            return name
        kept, path = [], ""
        for piece in name.split("."):
            path = f"{path}.{piece}" if path else piece
            if path not in self._dropped:
                kept.append(piece)
        return ".".join(kept)

    def known(self, t: torch.Tensor) -> Iterator[str]:
        """All names of one of the model's tensors, including wrappers' and aliases."""
        name = self.of(t)
        for plain in (name, *(alias for alias, first in self.aliases.items() if first == name)):
            yield plain
            if plain in self.wrapped:
                yield self.wrapped[plain]

    def of(self, t: torch.Tensor) -> str:
        """The name of one of the model's tensors; empty if unknown."""
        return self._of.get(id(t), "")

    def __contains__(self, t: torch.Tensor) -> bool:
        return id(t) in self._of


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, each under all its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def as_in(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's values by the names of this model's ``state_dict()``, complete: values missing in the checkpoint
    (frozen parameters, each worker's own) are the model's present ones."""
    names = Names(model)
    whole = {}
    for name, now in model.state_dict().items():
        plain = names.plain(name)
        value = state.get(name, state.get(plain, state.get(names.aliases.get(plain, plain), now)))
        whole[name] = value
    return whole
