"""Sparse tables as layers: their rows are on the servers, and a step touches those that its minibatch names."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.nn.functional as F

from .. import _tables
from ..errors import ConfigError, MisuseError

__all__ = ["Embedding", "EmbeddingBag", "Table", "Tables"]


class Table(_tables.Table):
    """Rows of ``dim`` values, keyed by ids from 0 to 2^63 - 1, which need not be dense::

        users = paraft.torch.Table("users", 32, max_rows=10_000_000, optimizer={"kind": "adagrad", "lr": 0.05})
        model = Net(paraft.torch.Embedding(users))
        model, optimizer = run.prepare(model, optimizer)

    The servers keep the rows and their optimizer's state, replicated as all weights. A row takes memory from its first
    gradient on; reading an id that has had none gives its initial values. ``run.prepare(model, ...)`` finds the tables of
    a model's layers; ``optimizer`` is that of its other weights.

    Rows are no parameters: ``model.parameters()`` and ``model.state_dict()`` do not have them, and clipping leaves them
    out. After ``run.finish()`` they are gone: evaluate, and read what is to be kept (:meth:`rows`), before.
    """

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, on the CPU: ``[*ids.shape, dim]``, float32. They do not train.

        Raises:
            MisuseError: an id is negative or no whole number, or the table is in no run, or its run is over.
        """
        found: torch.Tensor = self._tables().pull(self, _ids(ids, self.name))
        return found.view(*ids.shape, self.dim)


def _ids(ids: torch.Tensor, name: str) -> torch.Tensor:
    is_ = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
    if is_ not in (torch.int64, torch.int32):
        raise MisuseError(f"the ids for table `{name}` are {is_}: they are a tensor of int64 or int32")
    ids = ids.detach().reshape(-1).to("cpu", torch.int64).contiguous()
    if ids.numel() and int(ids.min()) < 0:
        raise MisuseError(f"id {int(ids.min())} for table `{name}`: ids are 0 or more")
    return ids


class Tables(_tables.Tables):
    """The tables of a run's model, and the gradients of the current step."""

    def __init__(self, run: Any, model: torch.nn.Module) -> None:
        super().__init__(run, [module.table for module in model.modules() if isinstance(module, _Layer)])
        #: For each table: ids and gradients of this step.
        self._given: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.all]

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

    def hand_over(self, session: Any) -> None:
        """The step's gradients go to the servers."""
        self.say_rates(session)
        for place, given in enumerate(self._given):
            for ids, gradient in given:
                session.add_rows(place, ids.data_ptr(), ids.numel(), gradient.data_ptr())
        self.forget()


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
