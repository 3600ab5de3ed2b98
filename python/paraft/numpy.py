"""Models of plain arrays in a job: a nest of dicts, lists and tuples with NumPy or JAX arrays, and a loop that
computes its own gradients::

    import paraft.numpy

    run = paraft.init()
    trainer = paraft.numpy.prepare(run, {"w": w, "b": b}, optimizer={"kind": "adam", "lr": 1e-3})
    for x, y in batches:
        params = trainer.step(gradients(trainer.params, x, y))
    run.finish()
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
from numpy.typing import NDArray

from . import _tables
from ._run import Run, Tensor, push_settings, toml
from .errors import ConfigError, MisuseError

__all__ = ["Table", "Trainer", "prepare"]

#: The leaves of a nest and their paths, in order.
Leaves = list[tuple[str, Any]]


class Table(_tables.Table):
    """Rows of ``dim`` values, keyed by ids from 0 to 2^63 - 1, which need not be dense::

        users = paraft.numpy.Table("users", 32, max_rows=10_000_000, optimizer={"kind": "adagrad", "lr": 0.05})
        trainer = paraft.numpy.prepare(run, params, optimizer, tables=[users])
        rows = users.rows(ids)                                     # [len(ids), 32]
        trainer.step(grads, rows={users: (ids, row_grads)})        # row_grads like rows; those of one id add up

    The servers keep the rows and their optimizer's state, replicated as all weights. A row takes memory from its first
    gradient on; reading an id that has had none gives its initial values. After ``run.finish()`` the rows are gone: read
    what is to be kept before.
    """

    def rows(self, ids: Any) -> NDArray[np.float32]:
        """The rows of these whole numbers, of any shape: ``[*ids.shape, dim]``.

        Raises:
            MisuseError: an id is negative or no whole number, or the table is in no run, or its run is over.
        """
        tables, given = self._tables(), self._ids(ids)
        # Zeros: a job that ends meanwhile sends no rows.
        found = np.zeros((*given.shape, self.dim), np.float32)
        tables.read(self, given.ctypes.data, given.size, found.ctypes.data)
        return found

    def prefetch(self, ids: Any) -> None:
        """Has the rows of these ids pulled while the script does something else. If rows were read since the last ``step()``,
        they come from the end of the next one on, else at once. :meth:`rows` then waits for what has not come; what it does not
        read before the ``step()`` after is dropped.

        Raises:
            MisuseError: an id is negative or no whole number, or the table is in no run, or its run is over.
        """
        tables, given = self._tables(), self._ids(ids)
        tables.ask(self, given.ctypes.data, given.size)

    def _ids(self, ids: Any) -> NDArray[np.int64]:
        a = np.asarray(ids)
        if a.dtype.kind not in "iu":
            raise MisuseError(f"the ids for table `{self.name}` are {a.dtype}: they are whole numbers")
        if a.size and not 0 <= int(a.min()) <= int(a.max()) < 1 << 63:
            raise MisuseError(f"id {int(a.min())} or {int(a.max())} for table `{self.name}`: ids are 0 to 2^63 - 1")
        return np.ascontiguousarray(a, np.int64).reshape(a.shape)


def prepare(
    run: Run,
    params: Any,
    optimizer: Optional[Mapping[str, Any]] = None,
    *,
    clip_norm: Optional[float] = None,
    clip_value: Optional[float] = None,
    rate: Union[float, Callable[[int], float], None] = None,
    encoding: str = "f32",
    tables: Sequence[Table] = (),
) -> Trainer:
    """Joins the job with these weights; waits until all its workers have joined.

    Worker 0's weights become the job's initial weights; :attr:`Trainer.params` has them.

    Args:
        run: of :func:`paraft.init`.
        params: arrays of float32, in a nest of dicts, lists and tuples, or for JAX in any pytree.
        optimizer: the servers' optimizer, as an ``[optimizer]`` table: ``{"kind": "adam", "lr": 1e-3}``. Default: the
            job file's.
        clip_norm: clips the gradient by its norm; in lock-step, the norm of the workers' mean.
        clip_value: clips each value of a gradient to at most this size.
        rate: the learning rate of this worker's pushes, in place of the optimizer's and its schedule: a number, or a
            function of the step, from 0, on the worker's own clock. A round in lock-step uses the mean of its
            workers' rates. :attr:`Trainer.rate` may be set between steps.
        encoding: the encoding of gradients: ``f32``, ``bf16``, ``fp16``, ``int8``, ... (``train.encoding``).
        tables: the tables whose rows this job trains beside ``params``.

    Raises:
        ConfigError: a leaf is not an array of float32, or the job does not support these settings.
        UnavailableError: the servers cannot be reached.
    """
    settings = push_settings(encoding, clip_norm, clip_value)
    settings += [f"optimizer={toml(optimizer)}"] if optimizer is not None else []
    return Trainer(run, params, settings, rate, tables)


class Trainer:
    """A worker's weights, and the step that changes them. :func:`prepare` creates it.

    Attributes:
        rate: see :func:`prepare`; None: the optimizer's.
    """

    def __init__(
        self,
        run: Run,
        params: Any,
        settings: list[str],
        rate: Union[float, Callable[[int], float], None] = None,
        tables: Sequence[Table] = (),
    ) -> None:
        self.run = run
        self.rate = rate
        leaves, self._tree = _flat(params)
        if not leaves:
            raise ConfigError("there is no array in the parameters")
        for name, leaf in leaves:
            if getattr(leaf, "dtype", None) != np.float32:
                is_ = getattr(leaf, "dtype", type(leaf).__name__)
                raise ConfigError(f"`{name}` is {is_}: what is trained is arrays of float32, as the servers hold them: .astype(\"float32\")")
            if not leaf.size:
                raise ConfigError(f"`{name}` has no values")
        #: The learning rate that the session uses.
        self._said: Optional[float] = None
        #: The gradients pushed before an interrupted wait.
        self._waited_for: Any = None
        self._names = [name for name, _ in leaves]
        twice = [name for i, name in enumerate(self._names) if name in self._names[:i]]
        if twice:
            raise ConfigError(f"two arrays are named `{twice[0]}`: a key has a dot in it")
        self._shapes: list[tuple[int, ...]] = [tuple(leaf.shape) for _, leaf in leaves]
        self._by_jax = [None if isinstance(leaf, np.ndarray) else leaf.sharding for _, leaf in leaves]
        ends = np.cumsum([leaf.size for _, leaf in leaves])
        self._values = np.empty(int(ends[-1]), np.float32)
        self._views: list[NDArray[np.float32]] = []
        for part, (_, leaf) in zip(np.split(self._values, ends[:-1]), leaves):
            part[:] = np.asarray(leaf).reshape(-1)
            view = part.reshape(leaf.shape)
            view.flags.writeable = False
            self._views.append(view)
        tensors: list[Tensor] = [(name, list(shape), True) for name, shape in zip(self._names, self._shapes)]
        address = self._values.ctypes.data
        self._tables = _tables.Tables(run, tables)
        vector = (tensors, address, self._values.size, self._values)
        self._session = run._join(*vector, settings=settings, tables=self._tables.specs())
        self._tables.begin()
        run._front = weakref.ref(self)
        self.pulled()

    @property
    def params(self) -> Any:
        """The weights, in the nest passed to :func:`prepare`.

        NumPy arrays are read-only views of memory that the next step changes: copy what you keep. JAX arrays are
        copies, because JAX computes lazily and would read later steps' values from a view.
        """
        return self._params

    def step(self, grads: Any, rows: Mapping[Table, tuple[Any, Any]] = {}) -> Any:  # noqa: B006
        """Pushes gradients, waits as the job's mode requires, pulls, and returns the new weights (:attr:`params`).

        Args:
            grads: the gradients of all weights, in the same nest; floating-point numbers of any type, sent in the
                ``encoding``.
            rows: for each table the ids that this step trains, and their gradients, ``[*ids.shape, dim]``, sent as
                float32. An id may come several times.

        Raises:
            MisuseError: their nest, shape or type differs from the weights', or from the table's.
            DivergedError: one is not a finite number.
            UnavailableError: the servers cannot be reached.
        """
        if self.run._waits:
            self.run._resume_wait()
            if grads is self._waited_for:
                return self._params  # the same step, called again
        leaves, _ = _flat(grads)
        names = [name for name, _ in leaves]
        if names != self._names:
            other = [n for n in self._names if n not in names] or [n for n in names if n not in self._names]
            raise MisuseError(f"the gradients are not in the nest of the parameters: `{other[0]}` is in one of them only")
        arrays = [self._array(i, leaf) for i, (_, leaf) in enumerate(leaves)]
        gradients = [(i, a.ctypes.data) for i, a in enumerate(arrays)]
        given = [self._of_rows(table, *of) for table, of in rows.items()]
        self._say_rate()
        self._tables.say_rates(self._session)
        for place, ids, values in given:
            self._session.add_rows(place, ids.ctypes.data, ids.size, values.ctypes.data)
        self._waited_for = grads
        self.run._finish_step(gradients)
        self._waited_for = None
        return self._params

    def _say_rate(self) -> None:
        rate = self.rate(self.run.step) if callable(self.rate) else self.rate
        if rate is not None and not (math.isfinite(rate) and rate >= 0):
            raise MisuseError(f"the rate of step {self.run.step} is {rate}; it is a number from 0")
        if rate != self._said:
            self._session.options([] if rate is None else [(float(rate), {})])
            self._said = rate

    def _array(self, i: int, leaf: Any) -> NDArray[np.float32]:
        a = np.asarray(leaf)
        if a.shape != self._shapes[i]:
            raise MisuseError(f"the gradient of `{self._names[i]}` has shape {a.shape}, and the weight {self._shapes[i]}")
        return self._floats(a, f"of `{self._names[i]}`")

    @staticmethod
    def _floats(a: NDArray[Any], whose: str) -> NDArray[np.float32]:
        if a.dtype.kind != "f" and a.dtype.name != "bfloat16":
            raise MisuseError(f"the gradient {whose} is {a.dtype}; gradients are floating numbers")
        return np.ascontiguousarray(a, np.float32).reshape(a.shape)

    def _of_rows(self, table: Table, ids: Any, values: Any) -> tuple[int, NDArray[np.int64], NDArray[np.float32]]:
        if table not in self._tables.all:
            raise MisuseError(f"{table!r} is none of this run's tables: prepare(..., tables=[...])")
        ids, a = table._ids(ids), np.asarray(values)
        if a.shape != (*ids.shape, table.dim):
            raise MisuseError(f"the gradients for table `{table.name}` have shape {a.shape}; for these ids it is {(*ids.shape, table.dim)}")
        return table._place, ids, self._floats(a, f"of table `{table.name}`'s rows")

    def pulled(self) -> None:
        """The vector has new values."""
        jax = sys.modules.get("jax")
        leaves = (v if s is None or jax is None else jax.device_put(v.copy(), s) for v, s in zip(self._views, self._by_jax))
        self._params = self._tree(leaves)


def _flat(tree: Any) -> tuple[Leaves, Callable[[Iterator[Any]], Any]]:
    """The leaves of a nest, and a function that builds such a nest from others. Only JAX knows a JAX pytree's
    nodes."""
    leaves: Leaves = list(_leaves(tree, ""))
    jax = sys.modules.get("jax")
    if jax is None or all(isinstance(leaf, (np.ndarray, jax.Array)) for _, leaf in leaves):
        return leaves, lambda new: _rebuilt(tree, new)
    by_path, shape = jax.tree_util.tree_flatten_with_path(tree)
    named = [(".".join(map(_key, path)) or "params", leaf) for path, leaf in by_path]
    return named, lambda new: jax.tree_util.tree_unflatten(shape, list(new))


def _leaves(tree: Any, at: str) -> Iterator[tuple[str, Any]]:
    """In JAX's order: dicts by their keys."""
    inside: Any
    if isinstance(tree, Mapping):
        inside = ((key, tree[key]) for key in _keys(tree))
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        inside = zip(tree._fields, tree)
    elif isinstance(tree, (list, tuple)):
        inside = enumerate(tree)
    elif tree is None:
        inside = ()
    else:
        yield at or "params", tree
        return
    for key, value in inside:
        yield from _leaves(value, f"{at}.{key}" if at else str(key))


def _rebuilt(tree: Any, new: Iterator[Any]) -> Any:
    if isinstance(tree, Mapping):
        made = {key: _rebuilt(tree[key], new) for key in _keys(tree)}
        return {key: made[key] for key in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_rebuilt(t, new) for t in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_rebuilt(t, new) for t in tree)
    return tree if tree is None else next(new)


def _keys(tree: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(tree)
    except TypeError:
        raise ConfigError(f"keys of a nest are all of one kind, to be put in order: {list(tree)}") from None


def _key(entry: Any) -> str:
    return str(next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)))
