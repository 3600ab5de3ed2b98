"""Maps a torch optimizer to the servers': the same formulas (common/src/optim), so that rates and decays have the
same meaning."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch

from .._run import toml
from ..errors import ConfigError, DataError
from ._flat import is_sharded
from ._tables import TableOptimizer
from ._together import Optimizers, each, owners

_LOG = logging.getLogger("paraft")

#: Options of torch's groups that a script may change while it trains, by the servers' names, for each kind.
_CHANGES: dict[str, dict[str, str]] = {
    "sgd": {},
    **dict.fromkeys(("momentum", "nesterov"), {"momentum": "momentum"}),
    "adagrad": {"eps": "eps"},
    "rmsprop": {"momentum": "momentum", "alpha": "square", "eps": "eps"},
    "adadelta": {"rho": "square", "eps": "eps"},
    **dict.fromkeys(("adam", "adamw", "adamax", "radam"), {"beta1": "momentum", "beta2": "square", "eps": "eps"}),
    # Its momenta depend on all earlier ones.
    "nadam": {"beta2": "square", "eps": "eps"},
}
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
        beta1, beta2 = g["betas"]
        own = {name: g[name] for name in options}
        if g.get("amsgrad"):
            own["amsgrad"] = True
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
    TableOptimizer: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: _adadelta,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _betas("adamw"),
    torch.optim.Adamax: _betas("adamax"),
    torch.optim.NAdam: _betas("nadam", "momentum_decay", "decoupled_weight_decay"),
    torch.optim.RAdam: _betas("radam", "decoupled_weight_decay"),
}


def _table(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    """The ``[optimizer]`` table for servers that act like an optimizer of this class on this group.

    Raises:
        Unmapped: the servers cannot; the text gives the reason.
    """
    make = _KINDS.get(kind)
    if make is None:
        known = ", ".join(k.__name__ for k in _KINDS if k is not TableOptimizer)
        raise Unmapped(f"{kind.__name__} is none of the servers' optimizers: {known}")
    return {**make(group), "lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}


def tables(optimizer: Optimizers) -> list[dict[str, Any]]:
    """The table of each parameter group.

    Raises:
        Unmapped: the servers cannot.
    """
    return [_table(_kind(one), g) for one in each(optimizer) for g in one.param_groups]


def _kind(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class that the script made it of."""
    kind = type(optimizer)
    return kind if kind in _KINDS or not hasattr(optimizer, "_paraft") else kind.__bases__[0]


def table(optimizer: Optimizers) -> dict[str, Any]:
    """The table of the first group.

    Raises:
        Unmapped: the servers cannot run a group of it.
    """
    return tables(optimizer)[0]


def _own(table: dict[str, Any], first: dict[str, Any]) -> Optional[str]:
    """A group's table in TOML, if its optimizer is another than the first group's."""
    shared = ("lr", "weight_decay")
    if {k: v for k, v in table.items() if k not in shared} == {k: v for k, v in first.items() if k not in shared}:
        return None
    return "\n".join(f"{key} = {toml(value)}" for key, value in table.items())


def groups(optimizer: Optimizers, classes: list[int], values: list[int]) -> list[tuple[int, float, float, Optional[str], bool]]:
    """Each class of groups: its number of values, rate, decay, its own table, and whether it maximizes. Empty if the job's
    optimizer is all there is to say."""
    of, all_groups = tables(optimizer), optimizer.param_groups
    first = [classes.index(c) for c in range(len(values))]
    found = [
        (n, of[i]["lr"], of[i]["weight_decay"], _own(of[i], of[0]), bool(all_groups[i].get("maximize", False)))
        for n, i in zip(values, first)
    ]
    return found if len(found) > 1 or found[0][3] or found[0][4] else []


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
    return [*_SLOTS[table["kind"]], *(["max_exp_avg_sq"] if table.get("amsgrad") else [])]


def _updates(state: Mapping[Any, Any], p: torch.Tensor) -> int:
    """The number of steps that an optimizer has made with a parameter. SGD has no count: only 0 or 1."""
    entry = state.get(p) or {}
    if "step" in entry:
        return int(entry["step"])
    return int(entry.get("momentum_buffer") is not None)


def brought(optimizer: Optimizers, params: list[torch.nn.Parameter], classes: list[int]) -> tuple[list[torch.Tensor], list[int]]:
    """An optimizer's present state in the servers' form: vectors over all parameters, and the number of updates of each
    class of groups. Without vectors it has made no step."""
    updates = [0] * (max(classes, default=0) + 1)
    few: dict[int, int] = {}
    names: dict[int, list[str]] = {}
    held = set(map(id, params))
    for table, group, c in zip(tables(optimizer), optimizer.param_groups, classes):
        for p in group["params"]:
            names[id(p)] = slots(table)
            if id(p) in held:
                count = _updates(optimizer.state, p)
                updates[c], few[c] = max(updates[c], count), min(few.get(c, count), count)
    if not any(updates):
        return [], []
    for c, least in few.items():
        if least < updates[c]:
            _LOG.warning(
                "the optimizer has made %d to %d steps with its parameters, and the servers count them together: from here on %d with each",
                least, updates[c], updates[c],
            )
    vectors = []
    for k in range(max(map(len, names.values()))):
        parts = []
        for p in params:
            own = optimizer.state.get(p, {}).get(names[id(p)][k]) if k < len(names[id(p)]) else None
            own = own.full_tensor() if own is not None and is_sharded(own) else own
            parts.append(torch.zeros(p.numel(), dtype=torch.float32, device="cpu") if own is None else own.detach().to("cpu", torch.float32).contiguous().reshape(-1))
        vectors.append(torch.cat(parts))
    return vectors, updates


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


#: Options of a class of groups: its rate, and by the servers' names what differs from its table.
Options = tuple[float, dict[str, float]]


class Watch:
    """Observes the changes that a script may make to an optimizer's groups during training, as schedulers do. The servers
    would not receive other changes."""

    def __init__(self, optimizer: Optimizers, classes: list[int]) -> None:
        """``classes``: each group's class on the servers; -1: none, because they have none of its parameters."""
        # The optimizers hold the front, which holds this.
        self._optimizers = [weakref.ref(one) for one in each(optimizer)]
        self._kinds = [_kind(one) for one in owners(optimizer)]
        self._tables = tables(optimizer)
        self._params = [list(g["params"]) for g in optimizer.param_groups]
        self._maximizes = [bool(g.get("maximize", False)) for g in optimizer.param_groups]
        self._classes = classes
        self.last = self.options()
        self._note()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for of in self._optimizers if (one := of()) is not None for group in one.param_groups]

    def _note(self) -> None:
        """Copies the groups, so that a step without changes costs one comparison. A tensor may change in place."""
        groups = self._groups()
        tensors = any(isinstance(v, torch.Tensor) for g in groups for v in g.values())
        self._noted = None if tensors else [dict(g) for g in groups]

    def options(self) -> list[Options]:
        """The present options of each of the servers' classes.

        Raises:
            ConfigError: groups of one class have different ones, or something was changed that cannot be.
        """
        found: dict[int, tuple[int, Options]] = {}
        for i, (group, c) in enumerate(zip(self._groups(), self._classes)):
            now = self._of(i, group)
            first, before = found.setdefault(c, (i, now))
            if c >= 0 and now != before:
                raise ConfigError(
                    f"parameter groups {first} and {i} had the same options at run.prepare(), so that the servers, with so many groups, keep them as "
                    f"one, and now have lr {before[0]:g} and {now[0]:g}, or other options. Give them different ones (or initial_lr) before, or make "
                    "fewer groups: up to 32 are kept apart"
                )
        return [found[c][1] for c in sorted(found) if c >= 0]

    def _of(self, i: int, group: dict[str, Any]) -> Options:
        """The rate of a group, and what differs from its table."""
        was = self._tables[i]
        now = _table(self._kinds[i], group)
        if now["kind"] != was["kind"]:  # of SGD: without momentum the servers keep no vector for it
            key = "nesterov" if now.get("momentum") and was.get("momentum") else "momentum"
            before = was["kind"] == "nesterov" if key == "nesterov" else was.get("momentum", 0)
            raise self._fixed(i, key, before, group[key])
        changes = {"weight_decay": "weight_decay", **_CHANGES[was["kind"]]}
        for key in {**was, **now}:
            value = was.get(key)
            can = key in changes or key == "lr"
            # Without momentum the servers keep no vector for it.
            if now.get(key) != value and not (can and now["kind"] == was["kind"]) or key == "momentum" and (now.get(key) == 0) != (value == 0):
                raise self._fixed(i, key, bool(value) if key == "amsgrad" else value, now.get(key, False))
        if bool(group.get("maximize", False)) != self._maximizes[i]:
            raise self._fixed(i, "maximize", self._maximizes[i], group.get("maximize"))
        return now["lr"], {name: float(now[key]) for key, name in changes.items() if key in was and now[key] != was[key]}

    @staticmethod
    def _fixed(i: int, key: str, was: Any, now: Any) -> ConfigError:
        return ConfigError(
            f"{key} of parameter group {i} was changed from {was!r} to {now!r}, and the servers cannot change it while a job trains: set it before "
            "run.prepare(), or prepare(..., apply=\"mean\")"
        )

    def changed(self) -> Optional[list[Options]]:
        """The options of all classes, if a script has changed any since the last call; otherwise None.

        Raises:
            ConfigError: something was changed that cannot be.
        """
        groups = self._groups()
        for i, (group, params) in enumerate(zip(groups, self._params)):
            if len(group["params"]) != len(params) or any(map(operator.is_not, group["params"], params)):
                raise ConfigError(
                    f"the parameters of group {i} were changed after run.prepare(): the servers train those that it had then. For others save, and "
                    "begin another run: paraft.init(resume=...)"
                )
        if groups == self._noted:
            return None
        if len(groups) != len(self._params):
            raise ConfigError("a parameter group was added or removed after run.prepare(): do so before")
        options = self.options()
        self._note()
        if options == self.last:
            return None
        self.last = options
        return options
