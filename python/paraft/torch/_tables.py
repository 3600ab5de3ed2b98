"""Sparse tables as layers: their rows are on the servers, and a step touches those that its minibatch names."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
import torch.nn.functional as F

from .. import _tables
from ..errors import ConfigError, MisuseError

__all__ = ["Embedding", "EmbeddingBag", "Table", "TableOptimizer", "Tables"]


class Table(_tables.Table):
    """Rows of ``dim`` values, keyed by ids from 0 to 2^63 - 1, which need not be dense::

        users = paraft.torch.Table("users", 32, max_rows=10_000_000, optimizer={"kind": "adagrad", "lr": 0.05})
        model = Net(paraft.torch.Embedding(users))
        model, optimizer = run.prepare(model, optimizer)

    The servers keep the rows and their optimizer's state, replicated as all weights. A row takes memory from its first
    gradient on; reading an id that has had none gives its initial values. ``run.prepare(model, ...)`` finds the tables of
    a model's layers; ``optimizer`` is that of its other weights.

    Rows are no parameters: ``model.parameters()`` and ``model.state_dict()`` do not have them; ``clip_grad_norm_()`` and a
    ``GradScaler`` count their gradients in. Of several optimizers a table's gradients go with the step of the one that trains
    the parameters beside its layers: those of the innermost module that has any. After ``run.finish()`` they are gone: evaluate, and read what is to be kept (:meth:`rows`), before.
    """

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, on the CPU: ``[*ids.shape, dim]``, float32. They do not train.

        Raises:
            MisuseError: an id is negative or no whole number, or the table is in no run, or its run is over.
        """
        found: torch.Tensor = self._tables().pull(self, _ids(ids, self.name))
        return found.view(*ids.shape, self.dim)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Has the rows of these ids pulled while the script does something else. Those of the next minibatch are named behind
        this one's ``backward()``, and come from the end of ``optimizer.step()`` on, or behind ``optimizer.step()``. The forward
        pass then waits for what has not come, and sees what it would have pulled itself at the step's end. What it does not
        read in that step is dropped.

        Raises:
            MisuseError: an id is negative or no whole number, or the table is in no run, or its run is over.
        """
        ids = _ids(ids, self.name)
        self._tables().ask(self, ids.data_ptr(), ids.numel())


def _ids(ids: torch.Tensor, name: str) -> torch.Tensor:
    is_ = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
    if is_ not in (torch.int64, torch.int32):
        raise MisuseError(f"the ids for table `{name}` are {is_}: they are a tensor of int64 or int32")
    ids = ids.detach().reshape(-1).to("cpu", torch.int64).contiguous()
    if ids.numel() and int(ids.min()) < 0:
        raise MisuseError(f"id {int(ids.min())} for table `{name}`: ids are 0 or more")
    return ids


class TableOptimizer(torch.optim.SGD):
    """The optimizer of a model whose trained weights are tables alone, each of which has its own: its ``step()`` pushes the rows'
    gradients::

        model, optimizer = run.prepare(model, paraft.torch.TableOptimizer())

    ``run.log(loss)`` records the loss of a step. ``prepare(..., clip_norm=)`` clips: ``clip_grad_norm_()`` is given no parameter,
    and does nothing."""

    def __init__(self) -> None:
        # The servers hold at least one value.
        self.holder = torch.nn.Module()
        self.holder.register_parameter("unused", torch.nn.Parameter(torch.zeros(1, device="cpu")))
        super().__init__(self.holder.parameters(), lr=0.0)


class Tables(_tables.Tables):
    """The tables of a run's model, and the gradients of the current step."""

    def __init__(self, run: Any, model: torch.nn.Module) -> None:
        super().__init__(run, [module.table for module in model.modules() if isinstance(module, _Layer)])
        #: For each table: ids and gradients of this step.
        self._given: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.all]
        #: The optimizer, of several, that steps each table.
        self._owners: list[Optional[int]] = [None] * len(self.all)

    def divide(self, model: torch.nn.Module, parts: list[set[int]]) -> None:
        """Gives each table to one of several optimizers; ``parts``: the parameters of each, by ``id()``.

        Raises:
            ConfigError: which one steps a table cannot be said.
        """
        modules = dict(model.named_modules())
        for place, table in enumerate(self.all):
            of: set[int] = set()
            for at in (name for name, layer in modules.items() if isinstance(layer, _Layer) and layer.table is table):
                beside: set[int] = set()
                while at and not beside:
                    at = at.rpartition(".")[0]
                    inside = {id(p) for p in modules[at].parameters()}
                    beside = {i for i, part in enumerate(parts) if part & inside}
                of |= beside
            if len(of) != 1:
                raise ConfigError(
                    f"table `{table.name}`: several optimizers train the parameters beside its layers, and one is to step it. Put its layers into a "
                    "module whose parameters are one optimizer's"
                )
            self._owners[place] = of.pop()

    def of(self, turn: Optional[Iterable[int]]) -> list[int]:
        """The tables that these of several optimizers step, by place; None: all."""
        return [place for place, owner in enumerate(self._owners) if turn is None or owner is not None and owner in turn]

    def gave(self, places: list[int]) -> bool:
        """Whether these have gradients that are not handed over."""
        return any(self._given[place] for place in places)

    def are_finite(self, places: list[int]) -> bool:
        """Whether the step's gradients of these are."""
        return all(bool(gradient.isfinite().all()) for place in places for _, gradient in self._given[place])

    def scale(self, places: list[int], factor: float) -> None:
        """Multiplies the step's gradients."""
        for place in places:
            self._given[place] = [(ids, gradient * factor) for ids, gradient in self._given[place]]

    def unscale(self, places: list[int], factor: float, found: dict[Any, torch.Tensor]) -> None:
        """A GradScaler unscales gradients by this factor, or looks for infinities in them (1): ``found`` then has it."""
        finite = self.are_finite(places)
        if factor != 1.0:
            self.scale(places, factor)
        if not found:
            found[torch.device("cpu")] = torch.zeros((), device="cpu")  # no parameter has a gradient
        if not finite:
            for flag in found.values():
                flag.fill_(1.0)

    def clip(self, places: list[int], others: list[torch.Tensor], max_norm: float, norm_type: float, finite: bool) -> torch.Tensor:
        """Clips this worker's gradients of these tables, and others, by their norm, as ``clip_grad_norm_()``; returns it. ``finite``: a
        norm that is not is an error."""
        for place in places:
            if len(self._given[place]) > 1:  # a row's gradient is the sum
                ids, at = torch.unique(torch.cat([ids for ids, _ in self._given[place]]), return_inverse=True)
                all_of = torch.cat([gradient for _, gradient in self._given[place]])
                self._given[place] = [(ids, all_of.new_zeros((len(ids), all_of.shape[1])).index_add_(0, at, all_of))]
        gradients = [*others, *(gradient for place in places for _, gradient in self._given[place])]
        norms = [torch.linalg.vector_norm(gradient, norm_type).to(gradients[0].device) for gradient in gradients]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if finite and not bool(norm.isfinite()):
            raise RuntimeError(f"the norm of the gradient is {float(norm)}, so that it cannot be clipped (error_if_nonfinite=True)")
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return norm

    def pull(self, table: Table, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids on the CPU."""
        # Zeros: a job that ends meanwhile sends no rows.
        rows = torch.zeros((ids.numel(), table.dim), dtype=torch.float32, device="cpu")
        self.read(table, ids.data_ptr(), ids.numel(), rows.data_ptr())
        return rows

    def train(self, table: Table, ids: torch.Tensor, rows: torch.Tensor, padding: Optional[int]) -> None:
        """Has the gradient of these rows pushed with the step, but for that of id ``padding``."""
        me = weakref.ref(self)

        def ready(leaf: torch.Tensor) -> None:
            tables, gradient = me(), leaf.grad
            leaf.grad = None
            if tables is not None and gradient is not None:
                gradient = gradient.detach().to("cpu", torch.float32)
                kept = slice(None) if padding is None else ids != padding
                tables._given[table._place].append((ids[kept], gradient[kept].contiguous()))

        leaf: Any = rows
        leaf.register_post_accumulate_grad_hook(ready)

    def forget(self, *tables: Table) -> None:
        """The step's gradients of these tables, or of all, are thrown away, as by ``zero_grad()``."""
        for table in tables or self.all:
            self._given[table._place].clear()

    def forget_of(self, places: list[int]) -> None:
        """As :meth:`forget`, by place."""
        for place in places:
            self._given[place].clear()

    def hand_over(self, session: Any, places: list[int]) -> None:
        """The step's gradients of these go to the servers."""
        self.say_rates(session)
        for place in places:
            for ids, gradient in self._given[place]:
                session.add_rows(place, ids.data_ptr(), ids.numel(), gradient.data_ptr())
        self.forget_of(places)


@functools.lru_cache(maxsize=None)
def _watch_zero_grad() -> None:
    """From now on ``model.zero_grad()``, also a wrapper's, throws the rows' gradients away too, as ``optimizer.zero_grad()``
    does: torch clears parameters alone, and rows are none."""
    clear: Any = torch.nn.Module.zero_grad

    @functools.wraps(clear)
    def zero_grad(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        clear(self, *args, **kwargs)
        for layer in self.modules():
            tables: Any = layer.table._of() if isinstance(layer, _Layer) else None
            if tables is not None:
                tables.forget(layer.table)

    torch.nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]


_jit: Any = torch.jit
#: Newer releases have it.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


class _Layer(torch.nn.Module):
    """A layer whose weights are a table."""

    def __init__(self, table: Table, padding_idx: Optional[int]) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise ConfigError(f"the layer's table is a {type(table).__name__}, and not a paraft.torch.Table")
        if padding_idx is not None and padding_idx < 0:
            raise ConfigError(f"padding_idx is {padding_idx}: it is an id, from 0")
        _watch_zero_grad()
        self.table, self.padding_idx = table, padding_idx
        self._trains = True

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, {self.table.dim}{padding}"

    def requires_grad_(self, requires_grad: bool = True) -> _Layer:
        """Whether this layer trains its table."""
        self._trains = requires_grad
        return self

    def _rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that a minibatch names, each once, and the row of each of its ids."""
        if _jit.is_tracing() or _is_exporting():
            raise MisuseError(f"the rows of table `{self.table.name}` are on the servers, and a traced or exported model has none")
        tables, flat = self.table._tables(), _ids(ids, self.table.name)
        distinct, places = torch.unique(flat, return_inverse=True)
        rows = tables.pull(self.table, distinct).to(ids.device)
        if self._trains and torch.is_grad_enabled():
            rows.requires_grad_()
            tables.train(self.table, distinct, rows, self.padding_idx)
        return rows, places.to(ids.device).view(ids.shape)


class Embedding(_Layer):
    """As ``torch.nn.Embedding``: the rows of ids of any shape, ``[..., dim]``. ``padding_idx``: this id gives zeros, and
    has no gradient."""

    def __init__(self, table: Table, *, padding_idx: Optional[int] = None) -> None:
        super().__init__(table, padding_idx)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, places = self._rows(ids)
        found = F.embedding(places, rows)
        if self.padding_idx is not None:
            found = found.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)
        return found


class EmbeddingBag(_Layer):
    """As ``torch.nn.EmbeddingBag``: bags of rows, summed (``sum``), averaged (``mean``) or their largest values (``max``).
    An empty bag is zeros. ``padding_idx``: this id is in no bag."""

    def __init__(
        self, table: Table, *, mode: str = "mean", padding_idx: Optional[int] = None, include_last_offset: bool = False
    ) -> None:
        super().__init__(table, padding_idx)
        if mode not in ("sum", "mean", "max"):
            raise ConfigError(f"mode is {mode!r}; it is \"sum\", \"mean\" or \"max\"")
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self, ids: torch.Tensor, offsets: Optional[torch.Tensor] = None, per_sample_weights: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        rows, places = self._rows(ids)
        padding = None
        if self.padding_idx is not None:
            at = places[ids == self.padding_idx]
            padding = int(at[0]) if at.numel() else None
        if not rows.shape[0]:
            rows = rows.new_zeros((1, self.table.dim))  # torch wants a row, also for empty bags
        return F.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
