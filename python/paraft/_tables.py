"""Sparse tables of a job, as the front ends have them: what a table is, and its rows by addresses of memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional

from . import _paraft
from ._run import toml
from .errors import ConfigError, MisuseError


class Table:
    """Rows on the servers, keyed by ids."""

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
        min_count: int = 1,
        expire: Optional[Mapping[str, Any]] = None,
        dtype: str = "f32",
    ) -> None:
        """
        Args:
            name: unique in the job: letters, digits, ``_``, ``-`` and ``.``.
            dim: values of a row, 1 to 1024.
            max_rows: rows for which the servers reserve memory. Each partition has room for its even share ``s`` and
                ``6 * sqrt(s) + 8`` more.
            optimizer: ``{"kind": "adagrad", "lr": 0.05}``. The kinds are ``sgd``, ``adagrad`` (``eps``),
                ``rowwise-adagrad`` (``eps``), ``ftrl`` (``beta``, ``l1``, ``l2``; needs ``init`` ``zeros``) and ``adam``
                (``beta1``, ``beta2``, ``eps``). Adam is lazy: a step changes the rows that it names, and a row's bias
                correction counts its own updates.
            init: ``{"kind": "uniform", "range": 0.05}``, ``{"kind": "normal", "std": 0.01}`` or ``{"kind": "zeros"}``.
            seed: of ``init``, from 0.
            partitions: parts that are pushed and applied by themselves, 1 to 1024.
            full: what happens when a new id comes to a full table: ``evict`` a row that has had no gradient for long, or
                ``refuse`` the id's gradients.
            min_count: an id becomes a row at this many updates that name it, 1 to 255; the gradients of those before are
                dropped.
            expire: which rows are removed though there is room: ``{"after": 100_000}``, those that so many updates in a row
                did not name, some of them later; with ``"norm_below": 0.01`` only those whose L2 norm is below it, and with ``"keep_at_least":
                1000`` the table keeps so many rows. None: no rows.
            dtype: the form of the weights on the servers: ``f32``, ``bf16`` or ``f16``; they are pulled as float32.

        Raises:
            ConfigError: an argument is of the wrong type, or out of its range.
        """
        for what, value, kind, example in (
            ("name", name, str, '"users"'),
            ("dim", dim, int, "32"),
            ("max_rows", max_rows, int, "1_000_000"),
            ("optimizer", optimizer, Mapping, '{"kind": "sgd", "lr": 0.1}'),
            ("init", init, Mapping, '{"kind": "zeros"}'),
            ("seed", seed, int, "0"),
            ("partitions", partitions, int, "16"),
            ("full", full, str, '"evict"'),
            ("min_count", min_count, int, "2"),
            ("expire", {} if expire is None else expire, Mapping, '{"after": 100_000}'),
            ("dtype", dtype, str, '"bf16"'),
        ):
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigError(f"table {name!r}: {what} is {value!r}; it is written like {example}")
        numbers = {"dim": dim, "max_rows": max_rows, "seed": seed, "partitions": partitions, "min_count": min_count}
        for what, number in numbers.items():
            if not 0 <= number < 2**63:
                raise ConfigError(f"table {name!r}: {what} is {number}; it is a number from 0 to 2^63 - 1")
        self.name, self.dim = name, dim
        self._lr: Optional[float] = None
        self._spec = {
            "name": name,
            "dim": dim,
            "partitions": partitions,
            "max_rows": max_rows,
            "full": full,
            "init": dict(init),
            "seed": seed,
            "optimizer": dict(optimizer),
            "min_count": min_count,
            "dtype": dtype,
        }
        if expire is not None:
            self._spec["expire"] = dict(expire)
        _paraft.check_table(self._toml())
        self._of: Callable[[], Optional[Tables]] = lambda: None
        self._place = 0

    def _toml(self) -> str:
        return "\n".join(f"{key} = {toml(value)}" for key, value in self._spec.items())

    @property
    def lr(self) -> Optional[float]:
        """The rate of the next steps, a number from 0; None: the optimizer's. A round in lock-step uses the mean of its
        workers' rates."""
        return self._lr

    @lr.setter
    def lr(self, rate: Optional[float]) -> None:
        try:
            number = None if rate is None else float(rate)
        except (TypeError, ValueError):
            number = math.nan
        if number is not None and not 0 <= number < math.inf:
            raise MisuseError(f"the rate of table `{self.name}` is {rate!r}; it is a number from 0, or None")
        self._lr = number

    def __repr__(self) -> str:
        return f"Table({self.name!r}, {self.dim})"

    def __reduce__(self) -> Any:
        raise TypeError(f"table `{self.name}` cannot be copied: its rows are on the servers. Give two layers the same Table to share it")

    def _tables(self) -> Any:
        """The tables of its run."""
        tables = self._of()
        if tables is None:
            raise MisuseError(f"table `{self.name}` is in no run: give it to the run's prepare() first")
        return tables


class Tables:
    """The tables of a run."""

    def __init__(self, run: Any, tables: Iterable[Table]) -> None:
        """
        Raises:
            ConfigError: two have one name, or one is in another run.
        """
        self._run = weakref.ref(run)
        self.all = list(dict.fromkeys(tables))
        names: dict[str, Table] = {}
        for table in self.all:
            if names.setdefault(table.name, table) is not table:
                raise ConfigError(f"two tables are named `{table.name}`: where they are one, make one Table, else give each its name")
            if table._of() is not None:
                raise ConfigError(f"table `{table.name}` is in another run: make one for each")
        self._rates: list[Optional[float]] = [None] * len(self.all)
        #: How often this worker has returned to the job.
        self._rejoins = 0

    def begin(self) -> None:
        """The run has joined: rows can be read."""
        for place, table in enumerate(self.all):
            table._of, table._place = weakref.ref(self), place

    def specs(self) -> list[str]:
        """Each table in TOML."""
        return [table._toml() for table in self.all]

    def read(self, table: Table, ids: int, count: int, into: int) -> None:
        """Reads the rows of int64 ids at an address, into float32 at another."""
        run, session = self._reads(table)
        with run._inside(f"reading rows of table `{table.name}`"):
            session.rows(table._place, ids, count, into)
        rejoins = run._query()["rejoins"]
        if rejoins != self._rejoins:
            # It had been taken out, and the step from which it continues has brought weights.
            self._rejoins = rejoins
            run._pulled()

    def ask(self, table: Table, ids: int, count: int) -> None:
        """Has the rows of int64 ids at an address pulled while the script does something else."""
        run, session = self._reads(table)
        with run._inside(f"reading rows of table `{table.name}`"):
            session.prefetch(table._place, ids, count)

    def _reads(self, table: Table) -> tuple[Any, Any]:
        run = self._run()
        if run is None or run._closed:
            raise MisuseError(
                f"the rows of table `{table.name}` were on the servers of a run that is over: read them, and evaluate, before run.finish()"
            )
        run._resume_wait()
        return run, run._joined()

    def say_rates(self, session: Any) -> None:
        """Passes on the rates that a script has set since."""
        rates = [table.lr for table in self.all]
        if rates != self._rates:
            session.table_rates(rates)
            self._rates = rates
