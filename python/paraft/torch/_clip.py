"""Notices that a script clips gradients, or unscales them, before it does: see :func:`watch`."""

from __future__ import annotations

import functools
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
    them. Other users of the functions notice nothing."""
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


def _noticed(function: Callable[..., Any], gradients: bool) -> Callable[..., Any]:
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
        for front in fronts_of(tensors, gradients=gradients):
            front.clips(gradients=gradients)
        if args:
            args = (given, *args[1:])
        else:
            kwargs[key] = given
        return function(*args, **kwargs)

    return noticed


def _unscaling(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def unscales(self: Any, optimizer: Any, inv_scale: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        front: Any = getattr(optimizer, "_paraft", None)
        if front in _FRONTS and front.run._session is not None and front.unscales(self._scale):
            inv_scale = torch.ones_like(inv_scale)  # they are unscaled
        return function(self, optimizer, inv_scale, *args, **kwargs)

    return unscales
