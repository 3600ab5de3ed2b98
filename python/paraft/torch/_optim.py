"""Maps a torch optimizer to the servers': the same formulas (common/src/optim), so that rates and decays have the
same meaning."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any, Optional

import torch

from ..errors import ConfigError, DataError
from ._flat import is_sharded

_LOG = logging.getLogger("paraft")

#: Options that may differ between parameter groups; all others must be equal.
OF_GROUP = ("lr", "weight_decay")
#: Options that change only the speed of torch's kernels.
_SPEED = {"foreach", "fused", "capturable", "differentiable"}


class Unmapped(Exception):
    """Why the servers cannot run an optimizer."""


def _sgd(g: dict[str, Any]) -> dict[str, Any]:
    if g["momentum"] == 0:
        return {"kind": "sgd"}
    if g["nesterov"]:
        return {"kind": "nesterov", "momentum": g["momentum"]}
    return {"kind": "momentum", "momentum": g["momentum"], "dampening": g["dampening"]}


def _betas(kind: str, *options: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def table(g: dict[str, Any]) -> dict[str, Any]:
        if g.get("amsgrad"):
            raise Unmapped("amsgrad=True: the servers have Adam without it")
        beta1, beta2 = g["betas"]
        own = {name: g[name] for name in options}
        return {"kind": kind, "beta1": float(beta1), "beta2": float(beta2), "eps": g["eps"], **own}

    return table


def _adam(g: dict[str, Any]) -> dict[str, Any]:
    return _betas("adamw" if g.get("decoupled_weight_decay") else "adam")(g)


def _adagrad(g: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "adagrad",
        "eps": g["eps"],
        "lr_decay": g["lr_decay"],
        "initial_accumulator": g["initial_accumulator_value"],
    }


def _rmsprop(g: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "rmsprop", **{name: g[name] for name in ("alpha", "eps", "momentum", "centered")}}


def _adadelta(g: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "adadelta", "rho": g["rho"], "eps": g["eps"]}


_KINDS: dict[type[torch.optim.Optimizer], Callable[[dict[str, Any]], dict[str, Any]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: _adadelta,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _betas("adamw"),
    torch.optim.Adamax: _betas("adamax"),
    torch.optim.NAdam: _betas("nadam", "momentum_decay", "decoupled_weight_decay"),
    torch.optim.RAdam: _betas("radam", "decoupled_weight_decay"),
}


def table(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The ``[optimizer]`` table for servers that act like this optimizer, with the rate and decay of its first group.

    Raises:
        Unmapped: the servers cannot; the text gives the reason.
    """
    kind = type(optimizer)
    make = _KINDS.get(kind)
    if make is None:
        known = ", ".join(k.__name__ for k in _KINDS)
        raise Unmapped(f"{kind.__name__} is none of the servers' optimizers: {known}")
    if any(g.get("maximize") for g in optimizer.param_groups):
        raise Unmapped("maximize=True: the servers descend; minimize the negative loss")
    if any("base_momentum" in g for g in optimizer.param_groups):  # a scheduler has set it
        raise Unmapped("a scheduler cycles its momentum (OneCycleLR, CyclicLR: cycle_momentum=True), and on the servers only lr changes")
    tables = [make(g) for g in optimizer.param_groups]
    for i, other in enumerate(tables[1:], 1):
        for key, value in tables[0].items():
            if other.get(key) != value:
                raise Unmapped(
                    f"parameter group {i} has {key} {other.get(key)!r} and group 0 {value!r}; groups have "
                    f"{' and '.join(OF_GROUP)} of their own, and nothing else"
                )
    first = optimizer.param_groups[0]
    return {**tables[0], "lr": float(first["lr"]), "weight_decay": float(first["weight_decay"])}


def groups(optimizer: torch.optim.Optimizer, classes: list[int], values: list[int]) -> list[tuple[int, float, float]]:
    """Values, rate and decay of each class of groups, if there are several."""
    first = [optimizer.param_groups[classes.index(c)] for c in range(len(values))]
    of = [(n, float(g["lr"]), float(g["weight_decay"])) for n, g in zip(values, first)]
    return of if len(of) > 1 else []


#: The state vectors of each kind, by torch's names; RMSprop's depend on its options.
_SLOTS = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "nesterov": ("momentum_buffer",),
    "adagrad": ("sum",),
    "adadelta": ("square_avg", "acc_delta"),
    "adamax": ("exp_avg", "exp_inf"),
    **dict.fromkeys(("adam", "adamw", "nadam", "radam"), ("exp_avg", "exp_avg_sq")),
}


def slots(table: dict[str, Any]) -> list[str]:
    """The names of the servers' state vectors for an ``[optimizer]`` table, in order."""
    if table["kind"] == "rmsprop":
        with_mean, with_momentum = table["centered"], table["momentum"] > 0
        return ["square_avg", *(["grad_avg"] if with_mean else []), *(["momentum_buffer"] if with_momentum else [])]
    return list(_SLOTS[table["kind"]])


def _updates(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> int:
    """The number of steps that an optimizer has made with a parameter. SGD has no count: only 0 or 1."""
    entry = optimizer.state.get(p) or {}
    if "step" in entry:
        return int(entry["step"])
    return int(entry.get("momentum_buffer") is not None)


def brought(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> tuple[list[torch.Tensor], int]:
    """An optimizer's present state in the servers' form: vectors over all parameters, and their number of updates.
    Without vectors it has made no step."""
    counts = [_updates(optimizer, p) for p in params]
    most = max(counts)
    if most == 0:
        return [], 0
    if min(counts) < most:
        _LOG.warning(
            "the optimizer has made %d to %d steps with its parameters, and the servers count them together: from here on %d with each",
            min(counts), most, most,
        )
    vectors = []
    for name in slots(table(optimizer)):
        parts = []
        for p in params:
            own = optimizer.state.get(p, {}).get(name)
            own = own.full_tensor() if own is not None and is_sharded(own) else own
            parts.append(torch.zeros(p.numel(), dtype=torch.float32, device="cpu") if own is None else own.detach().to("cpu", torch.float32).contiguous().reshape(-1))
        vectors.append(torch.cat(parts))
    return vectors, most


def state_of(of: dict[str, Any], vectors: dict[str, torch.Tensor], updates: int) -> dict[str, torch.Tensor]:
    """Torch's state of a parameter after this many updates by this table's optimizer."""
    kind = of["kind"]
    if updates == 0 and kind != "adagrad":
        return {}
    if kind in ("sgd", "momentum", "nesterov"):
        return vectors
    step = {"step": torch.tensor(float(updates), dtype=torch.float32, device="cpu")}
    if kind == "nadam":
        # Torch keeps the product of the momenta, a function of the number of steps, which soon becomes zero.
        product, t = 1.0, 1
        while t <= updates and product > 1e-50:
            product *= of["beta1"] * (1 - 0.5 * 0.96 ** (t * of["momentum_decay"]))
            t += 1
        step["mu_product"] = torch.tensor(product, dtype=torch.float32, device="cpu")
    return {**step, **vectors}


def plain(group: dict[str, Any]) -> dict[str, Any]:
    """The serializable options of a parameter group."""
    numbers = {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in group.items() if k != "params"}
    known = (bool, int, float, str, type(None))
    return {k: v for k, v in numbers.items() if isinstance(v, known) or isinstance(v, (list, tuple)) and all(isinstance(x, known) for x in v)}


def group(of: dict[str, Any]) -> dict[str, Any]:
    """The options of torch's optimizer for this table, without parameters.

    Raises:
        DataError: torch has no such optimizer.
    """
    options, kind = dict(of), of["kind"]
    del options["kind"]
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    if "initial_accumulator" in options:
        options["initial_accumulator_value"] = options.pop("initial_accumulator")
    if kind == "nesterov":
        options["nesterov"] = True
    name = "sgd" if kind in ("momentum", "nesterov") else kind
    make = next((k for k in _KINDS if k.__name__.lower() == name), None)
    if make is None:
        raise DataError(f"torch has no optimizer that is `{kind}`")
    make_any: Any = make
    whole: dict[str, Any] = make_any([torch.zeros(1, device="cpu")], **options).param_groups[0]
    return {k: v for k, v in whole.items() if k != "params"}


class Watch:
    """Observes the changes that a script may make to an optimizer's groups during training: rates, set by schedulers.
    The servers would not receive other changes."""

    def __init__(self, optimizer: torch.optim.Optimizer, classes: list[int]) -> None:
        """``classes``: each group's class on the servers; -1: none, because all its parameters are frozen."""
        self._groups = optimizer.param_groups
        #: Other keys are the script's own, and no optimizer reads them.
        self._options = set(optimizer.defaults) - _SPEED - {"lr"}
        self._params = [list(g["params"]) for g in self._groups]
        self._fixed = [self._of(g) for g in self._groups]
        self._classes = classes
        self._last = self.rates()
        self._note()

    def _note(self) -> None:
        """Copies the groups, so that a step without changes costs one comparison. A tensor may change in place."""
        tensors = any(isinstance(v, torch.Tensor) for g in self._groups for v in g.values())
        self._noted = None if tensors else [dict(g) for g in self._groups]

    def _of(self, group: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in group.items() if k in self._options}

    def rates(self) -> list[float]:
        """The present rate of each of the servers' classes.

        Raises:
            ConfigError: groups of one class have different rates.
        """
        rates: dict[int, tuple[int, float]] = {}
        for i, (g, c) in enumerate(zip(self._groups, self._classes)):
            first, rate = rates.setdefault(c, (i, float(g["lr"])))
            if c >= 0 and float(g["lr"]) != rate:
                raise ConfigError(
                    f"parameter groups {first} and {i} had the same lr and weight_decay at run.prepare(), so that the servers, with so many groups, "
                    f"keep them as one, and now have lr {rate:g} and {float(g['lr']):g}. Give them different ones (or initial_lr) before, or "
                    "make fewer groups: up to 32 are kept apart"
                )
        return [rates[c][1] for c in sorted(rates) if c >= 0]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has new groups, with loaded options."""
        self._groups = optimizer.param_groups

    def changed(self) -> Optional[list[float]]:
        """The rates of all groups, if a scheduler has set any since the last call; otherwise None.

        Raises:
            ConfigError: something other than a rate was changed.
        """
        for i, (group, params) in enumerate(zip(self._groups, self._params)):
            if len(group["params"]) != len(params) or any(map(operator.is_not, group["params"], params)):
                raise ConfigError(
                    f"the parameters of group {i} were changed after run.prepare(): the servers train those that it had then. For others save, and "
                    "begin another run: paraft.init(resume=...)"
                )
        if self._groups == self._noted:
            return None
        if len(self._groups) != len(self._fixed):
            raise ConfigError("a parameter group was added after run.prepare(): add it before")
        for i, (group, fixed) in enumerate(zip(self._groups, self._fixed)):
            for key, value in fixed.items():
                if group.get(key) != value:
                    raise ConfigError(
                        f"{key} of parameter group {i} was changed from {value!r} to {group.get(key)!r}: on the servers only lr "
                        "changes while a job trains; in mode bsp prepare(..., apply=\"mean\"), in others apply=\"worker\""
                    )
        rates = self.rates()
        self._note()
        if rates == self._last:
            return None
        self._last = rates
        return rates
