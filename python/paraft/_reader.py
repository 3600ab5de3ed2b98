"""Weights for processes that do not train: whole versions of a job's, while it trains."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

from . import _paraft
from ._fleet import Fleet
from .errors import ConfigError, VersionTimeoutError

if TYPE_CHECKING:
    import numpy as np
    import torch

#: A fleet that runs: one of :func:`paraft.local`, servers, or a run's folder.
AnyFleet = Union[Fleet, str, Sequence[str], None]


def reader(
    job: str,
    fleet: AnyFleet = None,
    *,
    dtype: str = "f32",
    only: Union[str, Sequence[str], None] = None,
    timeout: float = 30.0,
) -> Reader:
    """Opens a reader of a job's weights. It needs no model and is no worker: training does not wait for it::

        reader = paraft.reader("digits", "runs/digits-1")
        for version in reader.watch(every=100):      # each version that is at least 100 steps after the one before
            version.load_into(model)

    Args:
        job: the job's name, as ``paraft status`` shows it.
        fleet: servers (``"host:port,host:port"`` or a list), a run's folder, or a fleet of :func:`paraft.local`. Default: the servers in
            ``PARAFT_SERVERS``.
        dtype: ``f32``, or ``bf16`` or ``f16``, rounded by the servers to the nearest, ties to even.
        only: names of tensors; ``*`` stands for any text. Only these are read. Default: all.
        timeout: seconds to wait until the job has begun.

    Raises:
        VersionTimeoutError: no server answers, or the job has not begun.
        ConfigError: a value is invalid, the certificate does not cover the job, or no tensor has such a name.
    """
    servers, certs = _fleet(fleet)
    names = [only] if isinstance(only, str) else None if only is None else list(only)
    session = _paraft.Reader(servers=servers, job=job, dtype=dtype, only=names, timeout=_seconds(timeout), certs=certs)
    return Reader(session, dtype)


def _fleet(fleet: AnyFleet) -> tuple[list[str], Optional[str]]:
    if isinstance(fleet, Fleet):
        return list(fleet.servers), fleet.certs
    certs = None
    if fleet is None:
        fleet = os.environ.get("PARAFT_SERVERS", "")
    elif isinstance(fleet, str) and os.path.isdir(fleet):
        folder = os.path.join(fleet, "certs")
        certs = folder if os.path.isdir(folder) and not os.environ.get("PARAFT_CERTS") else None
        try:
            with open(os.path.join(fleet, "servers"), encoding="utf-8") as file:
                fleet = ",".join(file.read().split())
        except OSError as e:
            raise ConfigError(f"{fleet} is no run's folder: {e}") from None
    servers = fleet.split(",") if isinstance(fleet, str) else list(fleet)
    servers = [server.strip() for server in servers if server.strip()]
    if not servers:
        raise ConfigError("no fleet is named: give its servers or a run's folder, or set PARAFT_SERVERS")
    return servers, certs


def _seconds(timeout: float) -> float:
    if not (math.isfinite(timeout) and 0 < timeout <= 86_400):
        raise ConfigError(f"a timeout of {timeout} seconds; it is above 0, and at most 86400")
    return float(timeout)


class Reader:
    """Reads versions of a job's weights; see :func:`paraft.reader`. One thread at a time may use it."""

    def __init__(self, session: _paraft.Reader, dtype: str) -> None:
        self._session = session
        self._dtype = dtype
        self._tensors = session.tensors()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that it reads: names and shapes."""
        return {name: tuple(shape) for name, shape, _ in self._tensors}

    def get(self, *, at_least: int = 0, exactly: Optional[int] = None, timeout: float = 30.0) -> Version:
        """Receives a whole version, and checks it. What the caller uses does not change until :meth:`Version.load_into`.

        A version is named by a step. Without arguments it is the newest, or the one that the next step makes. It is never older than the
        one before. From asyncio: ``await asyncio.to_thread(reader.get)``.

        Args:
            at_least: the version of this step, or a later one.
            exactly: the version of this step. Ask before the job reaches it: versions are kept only for their readers.
            timeout: seconds to wait.

        Raises:
            VersionTimeoutError: there was none in time.
            VersionNotKeptError: the job has passed the version ``exactly``.
            OtherFoundingError: the job has begun anew: its versions are other weights.
            MisuseError: another thread uses this reader.
        """
        for name, step in ("at_least", at_least), ("exactly", exactly):
            if step is not None and not 0 <= step <= 1 << 53:
                raise ConfigError(f"{name}={step} is no step")
        if exactly is not None and at_least > exactly:
            raise ConfigError(f"exactly={exactly} is before at_least={at_least}")
        return Version(self._session.next(at_least, exactly, _seconds(timeout)), self._dtype, self._tensors)

    def watch(self, *, every: int = 1, timeout: float = 30.0) -> Iterator[Version]:
        """Yields the newest version, then each time the next one that is at least ``every`` steps later. Versions in between are left
        out. It ends when there is no later version within ``timeout`` seconds.

        Raises:
            VersionTimeoutError: not even the first came in time.
            OtherFoundingError: the job has begun anew.
        """
        if every < 1:
            raise ConfigError(f"every={every}; it is from 1")
        least: Optional[int] = None
        while True:
            try:
                version = self.get(at_least=least or 0, timeout=timeout)
            except VersionTimeoutError:
                if least is None:
                    raise
                return
            yield version
            least = version.step + every

    def __repr__(self) -> str:
        return f"<paraft.Reader of {len(self._tensors)} tensors in {self._dtype}>"


class Version:
    """A whole version of a job's weights, in memory."""

    def __init__(self, version: _paraft.Version, dtype: str, tensors: list[tuple[str, list[int], bool]]) -> None:
        self._version = version
        self._dtype = dtype
        self._tensors = tensors
        #: The step that names it. In ``bsp``: the weights after this step.
        self.step: int = version.step
        #: The newest version when it was asked for: ``reached - step`` is its age in steps then.
        self.reached: int = version.reached
        #: Equal for readers that read the same tensors in the same type.
        self.digest: str = f"{version.digest:016x}"
        #: Names the job's state: a job that begins anew has another.
        self.founding: int = version.founding
        #: Bytes that came over the network for it.
        self.received: int = version.received

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The tensors as NumPy arrays, by name: float32, or float16 for ``f16``. bf16 has no NumPy type and becomes float32."""
        import numpy as np

        arrays: dict[str, Any] = {}
        for i, (name, shape, _) in enumerate(self._tensors):
            raw = np.empty(shape, {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[self._dtype])
            self._version.copy(i, raw.ctypes.data, raw.nbytes)
            arrays[name] = (raw.astype(np.uint32) << 16).view(np.float32) if self._dtype == "bf16" else raw
        return arrays

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors as PyTorch's, by name, in the reader's type."""
        return {name: self._tensor(i) for i, (name, _, _) in enumerate(self._tensors)}

    def _tensor(self, i: int) -> torch.Tensor:
        import torch

        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[self._dtype]
        tensor = torch.empty(self._tensors[i][1], dtype=dtype)
        self._version.copy(i, tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return tensor

    def load_into(self, model: torch.nn.Module, *, strict: bool = True) -> None:
        """Copies the weights into a model's own tensors: each keeps its storage, device and type. Nothing is changed unless all fits.

        What the servers do not have stays as it is: frozen parameters, and buffers that are no running statistics. Counters of batches
        (``num_batches_tracked``) become the step.

        Args:
            strict: refuse if a tensor of the version is missing in the model, or a parameter that requires gradients is not in the
                version. A parameter under two names is in it if one of them is.

        Raises:
            ConfigError: names or shapes differ; the message has up to ten of them.
        """
        import torch

        there: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        shapes = {name: tuple(shape) for name, shape, _ in self._tensors}
        wrong = [
            f"`{name}` is {list(shape)} in the version, {list(there[name].shape)} in the model"
            for name, shape in shapes.items()
            if name in there and tuple(there[name].shape) != shape
        ]
        if strict:
            wrong += [f"`{name}` is not in the model" for name in shapes if name not in there]
            held = {id(t) for name, t in there.items() if name in shapes}
            missing = (name for name, t in there.items() if t.requires_grad and id(t) not in held)
            wrong += [f"`{name}` is not in the version" for name in missing]
        if wrong:
            more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise ConfigError(f"version {self.step} does not fit the model: {'; '.join(wrong[:10])}{more}")
        with torch.no_grad():
            for i, name in enumerate(shapes):
                if name in there:
                    there[name].copy_(self._tensor(i))
            for name, t in there.items():
                if name.rpartition(".")[2] == "num_batches_tracked" and name not in shapes:
                    t.fill_(self.step)

    def __repr__(self) -> str:
        return f"<paraft.Version {self.step}, digest {self.digest}>"
