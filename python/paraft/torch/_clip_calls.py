"""Notices that a script clips gradients, or unscales them, before it does: see :func:`watch`."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

#: The fronts of the runs whose scripts may clip.
_FRONTS: weakref.WeakSet[Any] = weakref.WeakSet()
#: Functions of ``torch.nn.utils.clip_grad`` (those of a release), and whether they are given gradients, not parameters.
_FUNCTIONS = {
    "clip_grad_norm_": False,
    "clip_grad_value_": False,
    "clip_grads_with_norm_": False,
    "_clip_grads_with_norm_": False,
    "get_total_norm": True,
    "_get_total_norm": True,
}


def watch(front: Any) -> None:
    """From now on ``front.clips()`` is called before torch's functions look at gradients of its parameters, or change
    them. What it returns in a tuple is their result; with None they go on. Other users of the functions notice nothing."""
    _install()
    _FRONTS.add(front)


def fronts_of(tensors: Iterable[torch.Tensor], *, gradients: bool) -> list[Any]:
    """The fronts of the runs that train some of these parameters, or have some of these ``gradients``."""
    given = set(map(id, tensors))
    found = []
    for front in list(_FRONTS):
        if front.run._session is None:
            continue
        params = front.flat.params
        if any(id(p.grad if gradients else p) in given for p in params if not gradients or p.grad is not None):
            found.append(front)
    return found


@functools.lru_cache(maxsize=None)
def _install() -> None:
    for name, gradients in _FUNCTIONS.items():
        function: Any = getattr(clip_grad, name, None)
        # The decorator that torch puts around each holds the function itself in a cell: so those notice too that scripts have
        # imported by name. In a release without it, a gradient that is changed too early is an error of step().
        code = getattr(function, "__code__", None)
        if code is not None and "func" in code.co_freevars:
            cell = function.__closure__[code.co_freevars.index("func")]
            cell.cell_contents = _noticed(cell.cell_contents, gradients)
    scaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    scaler._unscale_grads_ = _unscaling(scaler._unscale_grads_)


class Call:
    """A script's call of one of the functions."""

    def __init__(
        self, name: str, of: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], gradients: bool
    ) -> None:
        self.name = name
        self.tensors = tensors
        #: They are gradients, not their parameters.
        self.gradients = gradients
        bound = of.bind(*args, **kwargs)
        bound.apply_defaults()
        self._given = bound.arguments

    def number(self, name: str) -> float:
        """An argument."""
        return float(self._given[name])

    @property
    def must_be_finite(self) -> bool:
        """Whether a norm that is not finite is an error."""
        return bool(self._given.get("error_if_nonfinite", False))


def _noticed(function: Callable[..., Any], gradients: bool) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        if not _FRONTS:
            return function(*args, **kwargs)
        key = "tensors" if gradients else "parameters"
        given = args[0] if args else kwargs.get(key)
        if given is None:
            return function(*args, **kwargs)
        tensors = [given] if isinstance(given, torch.Tensor) else list(given)
        if isinstance(given, types.GeneratorType):
            given = (t for t in tensors)  # torch warns of an empty one
        elif not isinstance(given, torch.Tensor):
            given = tensors
        if args:
            args = (given, *args[1:])
        else:
            kwargs[key] = given
        for front in fronts_of(tensors, gradients=gradients):
            done = front.clips(Call(function.__name__.removeprefix("_"), signature, args, kwargs, tensors, gradients))
            if done is not None:
                return done[0]
        return function(*args, **kwargs)

    return noticed


def _unscaling(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def unscales(self: Any, optimizer: Any, inv_scale: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        front: Any = getattr(optimizer, "_paraft", None)
        if front not in _FRONTS or front.run._session is None:
            return function(self, optimizer, inv_scale, *args, **kwargs)
        of = getattr(optimizer, "_paraft_place", None)
        rest = front.unscales(self._scale, of)
        if rest is not None:
            inv_scale = torch.full_like(inv_scale, rest)
        found = function(self, optimizer, inv_scale, *args, **kwargs)
        front.unscaled(found, of, inv_scale)
        return found

    return unscales
