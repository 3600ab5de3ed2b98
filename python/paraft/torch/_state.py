"""An optimizer's state as values that the servers hold: what ``state_dict()`` has of it, whatever the optimizer is.

A dry run on a copy shows which tensors and numbers the optimizer keeps for each parameter. Tensors of float32 are
carried as they are, and all others bit by bit, in pieces that a float32 holds exactly.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch

from ..errors import ConfigError

#: Steps of the dry run. The state has its final form after the second one.
_STEPS = 3
#: A float64 holds every whole number up to here.
_EXACT = 1 << 53
#: Pieces of 16 bits in a number.
_PIECES = 4
#: What schedulers set, so that each worker has it by itself.
_SCHEDULED = ("lr", "initial_lr")
#: Options that change only the speed of torch's kernels.
_SPEED = ("foreach", "fused", "capturable", "differentiable")


class Uncarried(Exception):
    """Why the servers cannot hold an optimizer's state."""


#: The form of a state: containers with forms inside, numbers by their type, tensors by shape and type.
Form = Any


def _form(value: Any, name: str) -> Form:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise Uncarried(f"its state `{name}` is no plain tensor ({type(value).__name__}, {value.layout})")
        return ("tensor", tuple(value.shape), value.dtype)
    if isinstance(value, (bool, int, float)):
        return ("number", type(value))
    if isinstance(value, dict):
        return ("dict", tuple((key, _form(inner, f"{name}.{key}")) for key, inner in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(_form(inner, f"{name}[{i}]") for i, inner in enumerate(value)))
    if value is None or isinstance(value, (str, torch.dtype, torch.device)):
        return ("constant", value)
    raise Uncarried(f"its state `{name}` is a {type(value).__name__}")


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors and numbers, in order."""
    if isinstance(value, (torch.Tensor, bool, int, float)):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)


def _rebuilt(template: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same containers, with each leaf replaced."""
    if isinstance(template, (torch.Tensor, bool, int, float)):
        return leaf(template)
    if isinstance(template, dict):
        return {key: _rebuilt(inner, leaf) for key, inner in template.items()}
    if isinstance(template, (list, tuple)):
        return type(template)(_rebuilt(inner, leaf) for inner in template)
    return template


def _room(t: torch.Tensor) -> int:
    """Values that carry a tensor."""
    if t.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return t.numel()
    return t.numel() * (t.element_size() // 2 if t.element_size() % 2 == 0 else t.element_size())


def _pieces(t: torch.Tensor) -> torch.Tensor:
    """What carries a tensor, as a flat vector on its device."""
    flat = t.detach().contiguous().reshape(-1)
    if t.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return flat
    return flat.view(torch.int16 if t.element_size() % 2 == 0 else torch.uint8)


def _joined(pieces: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The reverse: a tensor like another one."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    if like.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        pieces = pieces.to(torch.int16 if like.element_size() % 2 == 0 else torch.uint8).view(like.dtype)
    return made.copy_(pieces.view(like.shape))


def _numeric(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or isinstance(value, torch.Tensor) and value.numel() == 1


class State:
    """The places of an optimizer's state in a vector of ``values`` values: first the numbers, of all parameters and of
    the groups, then the tensors.

    ``params``: the trained ones, in order.

    Raises:
        Uncarried: it cannot be carried.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._params = params
        inner = next((k for k, v in vars(optimizer).items() if isinstance(v, torch.optim.Optimizer)), None)
        if inner is not None:
            raise Uncarried(f"it holds another optimizer (`{inner}`), whose state is not in its own")
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            raise Uncarried("it has a state_dict() of its own")
        _check_keys(optimizer, params)
        try:
            self._look(empty=True)
        except Exception as first:
            # Some make their state when they are made, and cannot step without it.
            if not optimizer.state:
                raise Uncarried(str(first)) from None
            try:
                self._look(empty=False)
            except Exception as why:
                raise Uncarried(str(why)) from None
        numbers = [1 + max(sum(1 for leaf in _leaves(t) if not isinstance(leaf, torch.Tensor)) for t in of) for of in self._templates]
        rooms = [max(sum(_room(leaf) for leaf in _leaves(t) if isinstance(leaf, torch.Tensor)) for t in of) for of in self._templates]
        self._numbers = sum(numbers) + len(self._options)
        self._ends: list[tuple[int, int]] = []
        at, place = 0, self._numbers * _PIECES
        for count, room in zip(numbers, rooms):
            self._ends.append((at, place))
            at, place = at + count, place + room
        self.values = place

    def _look(self, *, empty: bool) -> None:
        """The dry run: the forms that each parameter's state may have, from the first on, with an example of each, and the
        options of groups that are the optimizer's own state."""
        optimizer, params = self._optimizer, self._params
        held = {key: value for key, value in vars(optimizer).items() if "hook" not in key and key not in ("step", "state", "param_groups")}
        copied: dict[int, Any] = {}
        twins = []
        for p in params:
            twin = torch.nn.Parameter(p.detach().clone())
            twin.__dict__.update(p.__dict__)  # optimizers read marks there
            copied[id(p)] = twin
            twins.append(twin)
        twin_of = dict(zip(map(id, params), twins))
        run: Any = type(optimizer).__new__(type(optimizer))
        run.__dict__.update({key: value for key, value in vars(optimizer).items() if "hook" in key})
        run.__dict__.update(copy.deepcopy(held, copied))
        for key in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if hasattr(run, key):
                setattr(run, key, type(getattr(run, key))())
        # A frozen parameter is in a group too, and has no gradient.
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        run.param_groups = copy.deepcopy(groups, copied)
        for mine, g in zip(run.param_groups, optimizer.param_groups):
            mine["params"] = [twin_of.get(id(p), p) for p in g["params"]]
        run.state = collections.defaultdict(dict)
        if not empty:
            for owner, entry in optimizer.state.items():
                run.state[twin_of[id(owner)]] = copy.deepcopy(dict(entry), copied)
        draw = torch.Generator().manual_seed(0)
        forms: list[list[Form]] = [[_form(run.state.get(t, {}), "")] for t in twins]
        self._templates: list[list[Any]] = [[copy.deepcopy(dict(run.state.get(t, {})))] for t in twins]
        before = {key: value for key, value in vars(run).items() if isinstance(value, (bool, int, float))}
        step = own_step(type(optimizer))
        grew: Optional[str] = None
        devices = sorted({t.device.index or 0 for t in twins if t.is_cuda})
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            for made in range(_STEPS):
                for t in twins:
                    t.grad = (torch.randn(t.shape, generator=draw) * 1e-3).to(t.device, t.dtype)
                step(run)
                for t, known, templates in zip(twins, forms, self._templates):
                    now = _form(run.state.get(t, {}), "")
                    if now in known:
                        continue
                    known.append(now)
                    templates.append(copy.deepcopy(dict(run.state.get(t, {}))))
                    grew = "its state still changes its form after two steps" if made == _STEPS - 1 else grew
        if grew:
            raise Uncarried(grew)
        _check_keys(run, twins)
        changed = next((k for k, v in before.items() if getattr(run, k) != v and not k.startswith("_step_count")), None)
        if changed is not None:
            raise Uncarried(f"its step() changes its attribute `{changed}`, which is not in its state_dict()")
        self._forms = forms
        #: Group, key and type.
        self._options: list[tuple[int, str, Any]] = []
        for i, (was, now, g) in enumerate(zip(groups, run.param_groups, optimizer.param_groups)):
            for key, value in now.items():
                if key == "params" or key in _SPEED:
                    continue
                if _numeric(value):
                    moved = key in was and _numeric(was[key]) and float(was[key]) != float(value)
                    if key not in _SCHEDULED or moved:
                        self._options.append((i, key, type(value)))
                elif key not in was or _plain(was[key]) != _plain(value):
                    raise Uncarried(f"its step() changes `{key}` of a parameter group, which is no number")

    def gather(self, into: torch.Tensor) -> None:
        """Writes the present state.

        Raises:
            ConfigError: it has a form that the dry run has not shown.
        """
        numbers: list[float] = []
        places: list[torch.Tensor] = []
        tensors: list[torch.Tensor] = []
        for p, forms, (at, place) in zip(self._params, self._forms, self._ends):
            entry = self._optimizer.state.get(p) or {}
            try:
                form = forms.index(_form(entry, ""))
            except (ValueError, Uncarried):
                raise ConfigError(
                    f"the state of {type(self._optimizer).__name__} has another form than its first steps had in prepare(), so that the "
                    "servers have no place for it: prepare(..., apply=\"worker\")"
                ) from None
            numbers += [0.0] * (at - len(numbers)) + [float(form)]
            for leaf in _leaves(entry):
                if isinstance(leaf, torch.Tensor):
                    pieces = _pieces(leaf)
                    tensors.append(pieces)
                    places.append(into[place : place + pieces.numel()])
                    place += pieces.numel()
                else:
                    numbers.append(_number(leaf))
        numbers += [0.0] * (self._numbers - len(self._options) - len(numbers))
        # Not a number: the group has no such option yet.
        numbers += [_number(self._optimizer.param_groups[i].get(key, math.nan)) for i, key, _ in self._options]
        bits = torch.tensor(numbers, dtype=torch.float64, device="cpu").view(torch.int16)
        into[: bits.numel()].copy_(bits)
        with torch.no_grad():
            if tensors:
                torch._foreach_copy_(places, tensors)

    def restore(self, of: torch.Tensor) -> None:
        """The optimizer takes this state."""
        numbers = of[: self._numbers * _PIECES].to(torch.int16).view(torch.float64).tolist()
        state = self._optimizer.state
        for p, templates, (at, place) in zip(self._params, self._templates, self._ends):
            template = templates[int(numbers[at])]
            at += 1
            where = [at, place]

            def leaf(like: Any, where: list[int] = where) -> Any:
                if isinstance(like, torch.Tensor):
                    room = _room(like)
                    where[1] += room
                    return _joined(of[where[1] - room : where[1]], like)
                where[0] += 1
                return type(like)(numbers[where[0] - 1])

            entry = _rebuilt(template, leaf)
            if entry:
                state[p] = entry
            else:
                state.pop(p, None)
        for (i, key, kind), value in zip(self._options, numbers[self._numbers - len(self._options) :]):
            group = self._optimizer.param_groups[i]
            now = group.get(key)
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            elif not math.isnan(value):
                group[key] = torch.tensor(value) if issubclass(kind, torch.Tensor) else kind(value) if kind(value) == value else value


class States:
    """The places of several optimizers' states in a vector of ``values`` values, one behind the other.

    Raises:
        Uncarried: one cannot be carried; it says which.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._all: list[State] = []
        for one in optimizers:
            try:
                self._all.append(State(one, [p for group in one.param_groups for p in group["params"] if p.requires_grad]))
            except Uncarried as why:
                raise Uncarried(f"{type(one).__name__}: {why}") from None
        self.values = sum(state.values for state in self._all)

    def gather(self, into: torch.Tensor) -> None:
        """Writes the present states.

        Raises:
            ConfigError: one has a form that the dry run has not shown.
        """
        for state, part in zip(self._all, self._split(into)):
            state.gather(part)

    def restore(self, of: torch.Tensor) -> None:
        """The optimizers take these states."""
        for state, part in zip(self._all, self._split(of)):
            state.restore(part)

    def _split(self, vector: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(vector, [state.values for state in self._all])


def own_step(kind: Any) -> Callable[..., Any]:
    """An optimizer's ``step`` without the hooks that torch puts around it."""
    step: Any = kind.step
    plain: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain


def _check_keys(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    known = set(map(id, params))
    if any(id(key) not in known for key in optimizer.state):
        raise Uncarried("it keeps state of something else than a trained parameter")


def _plain(value: Any) -> Any:
    """A value that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, int) and abs(value) > _EXACT:
        raise ConfigError(f"the optimizer's state has the number {value}, and the servers hold whole numbers up to 2^53")
    return number
