"""Sparse tables as layers: their rows are on the servers, and a step touches those that its minibatch names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F

from .._run import toml
from ..errors import ConfigError, MisuseError

__all__ = ["Embedding", "EmbeddingBag", "Table", "Tables"]


class Table:
    """Rows of ``dim`` values, keyed by ids from 0 to 2^63 - 1, which need not be dense::

        users = paraft.torch.Table("users", 32, max_rows=10_000_000, optimizer={"kind": "adagrad", "lr": 0.05})
        model = Net(paraft.torch.Embedding(users))
        model, optimizer = run.prepare(model, optimizer)

    The servers keep the rows and their optimizer's state, replicated as all weights. A row takes memory from its first
    gradient on; reading an id that has had none gives its initial values. ``run.prepare(model, ...)`` finds the tables of
    a model's layers.

    Args:
        name: unique in the job.
        dim: values of a row, 1 to 1024.
        max_rows: upper bound on rows, for which the servers reserve memory.
        optimizer: ``sgd``, ``adagrad``, ``rowwise-adagrad``, ``ftrl`` or ``adam``, with its options.
        init: ``{"kind": "uniform", "range": 0.05}``, ``{"kind": "normal", "std": 0.01}`` or ``{"kind": "zeros"}``.
        seed: of ``init``.
        partitions: parts that are pushed and applied by themselves, 1 to 1024.
        full: what happens when a new id comes to a full table: ``evict`` a row that has had no gradient for long, or
            ``refuse`` the id's gradients.

    Attributes:
        lr: the rate of the next steps, as a scheduler may set it; None: the optimizer's.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        max_rows: int,
        optimizer: Mapping[str, Any],
        init: Mapping[str, Any] = {"kind": "uniform", "range": 0.05},  # noqa: B006
        seed: int = 0,
        partitions: int = 16,
        full: str = "evict",
    ) -> None:
        self.name, self.dim = name, dim
        self.lr: Optional[float] = None
        self._spec = {
            "name": name,
            "dim": dim,
            "partitions": partitions,
            "max_rows": max_rows,
            "full": full,
            "init": dict(init),
            "seed": seed,
            "optimizer": dict(optimizer),
        }
        self._of: Callable[[], Optional[Tables]] = lambda: None
        self._place = 0

    def __repr__(self) -> str:
        return f"Table({self.name!r}, {self.dim})"

    def __reduce__(self) -> Any:
        raise TypeError(f"table `{self.name}` cannot be copied: its rows are on the servers. Give two layers the same Table to share it")

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, on the CPU: ``[len(ids), dim]``, float32. They do not train."""
        tables = self._of()
        if tables is None:
            raise MisuseError(f"table `{self.name}` is in no run: run.prepare(model, optimizer) with a model that has it comes first")
        return tables.pull(self, _ids(ids, self.name))


def _ids(ids: torch.Tensor, name: str) -> torch.Tensor:
    if ids.dtype not in (torch.int64, torch.int32):
        raise MisuseError(f"the ids for table `{name}` are {ids.dtype}: they are int64 or int32")
    ids = ids.detach().reshape(-1).to("cpu", torch.int64).contiguous()
    if ids.numel() and int(ids.min()) < 0:
        raise MisuseError(f"id {int(ids.min())} for table `{name}`: ids are 0 or more")
    return ids


class Tables:
    """The tables of a run, and the gradients of the current step."""

    def __init__(self, run: Any, tables: Sequence[Table]) -> None:
        self._run = weakref.ref(run)
        self.all = list(tables)
        #: For each table: ids and gradients of this step.
        self._given: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in tables]
        self._rates: list[Optional[float]] = [None] * len(self.all)

    @staticmethod
    def of(model: torch.nn.Module) -> list[Table]:
        """The tables of a model's layers.

        Raises:
            ConfigError: two have one name, or one is in another run.
        """
        found: dict[str, Table] = {}
        for module in model.modules():
            if isinstance(module, _Layer):
                table = module.table
                if found.setdefault(table.name, table) is not table:
                    raise ConfigError(f"two tables are named `{table.name}`: give both layers the same Table, or each another name")
                if table._of() is not None:
                    raise ConfigError(f"table `{table.name}` is in another run: make one for each")
        return list(found.values())

    def begin(self) -> None:
        """The run has joined: layers may read."""
        for place, table in enumerate(self.all):
            table._of, table._place = weakref.ref(self), place

    def specs(self) -> list[str]:
        """Each table in TOML."""
        return ["\n".join(f"{key} = {toml(value)}" for key, value in table._spec.items()) for table in self.all]

    def _session(self) -> Any:
        run = self._run()
        if run is None:
            raise MisuseError("the run of this table is gone")
        run._resume_wait()
        return run._joined()

    def pull(self, table: Table, ids: torch.Tensor) -> torch.Tensor:
        """The rows of distinct ids."""
        rows = torch.empty((ids.numel(), table.dim), dtype=torch.float32)
        session, run = self._session(), self._run()
        with run._inside("a table's forward pass"):  # type: ignore[union-attr]
            session.rows(table._place, ids.data_ptr(), ids.numel(), rows.data_ptr())
        return rows

    def train(self, table: Table, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Has the gradient of these rows pushed with the step."""
        me = weakref.ref(self)

        def ready(leaf: torch.Tensor) -> None:
            tables, gradient = me(), leaf.grad
            leaf.grad = None
            if tables is not None and gradient is not None:
                gradient = gradient.detach().to("cpu", torch.float32).contiguous()
                tables._given[table._place].append((ids, gradient))

        rows.register_post_accumulate_grad_hook(ready)

    def forget(self) -> None:
        """The step's gradients are thrown away, as by ``zero_grad()``."""
        for given in self._given:
            given.clear()

    def hand_over(self, session: Any) -> None:
        """The step's gradients go to the servers."""
        rates = [None if table.lr is None else float(table.lr) for table in self.all]
        if rates != self._rates:
            session.table_rates(rates)
            self._rates = rates
        for place, given in enumerate(self._given):
            for ids, gradient in given:
                session.add_rows(place, ids.data_ptr(), ids.numel(), gradient.data_ptr())
        self.forget()


class _Layer(torch.nn.Module):
    """A layer whose weights are a table."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise ConfigError(f"the layer's table is a {type(table).__name__}, and not a paraft.torch.Table")
        self.table = table

    def extra_repr(self) -> str:
        return f"{self.table.name!r}, {self.table.dim}"

    def _rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that a minibatch names, each once, and the row of each of its ids."""
        tables = self.table._of()
        if tables is None:
            raise MisuseError(f"table `{self.table.name}` is in no run: call run.prepare(model, optimizer) first")
        flat = _ids(ids, self.table.name)
        distinct, places = torch.unique(flat, return_inverse=True)
        rows = tables.pull(self.table, distinct).to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            tables.train(self.table, distinct, rows)
        return rows, places.to(ids.device).view(ids.shape)


class Embedding(_Layer):
    """As ``torch.nn.Embedding``: the rows of ids of any shape, ``[..., dim]``. ``padding_idx``: this id gives zeros, and
    has no gradient."""

    def __init__(self, table: Table, *, padding_idx: Optional[int] = None) -> None:
        super().__init__(table)
        self.padding_idx = padding_idx

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
        super().__init__(table)
        if mode not in ("sum", "mean", "max"):
            raise ConfigError(f"mode is {mode!r}; it is \"sum\", \"mean\" or \"max\"")
        self.mode, self.padding_idx, self.include_last_offset = mode, padding_idx, include_last_offset

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
