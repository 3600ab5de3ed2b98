"""Weights for processes that do not train: whole versions of a job's, while it trains."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

from . import _paraft
from ._fleet import Fleet
from .errors import ConfigError, JobEndedError

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
    share: bool = False,
) -> Reader:
    """Opens a reader of a job's weights. It needs no model and is no worker: training does not wait for it::

        reader = paraft.reader("digits", "runs/digits-1")
        for version in reader.watch(every=100):      # each at least 100 steps after the one before, and the last
            version.load_into(model)

    Args:
        job: the job's name, as ``paraft status`` shows it.
        fleet: servers (``"host:port,host:port"`` or a list), a run's folder, or a fleet of :func:`paraft.local`. Default: the servers in
            ``PARAFT_SERVERS``.
        dtype: ``f32``, or ``bf16`` or ``f16``, rounded by the servers to the nearest, ties to even.
        only: names of tensors; ``*`` stands for any text. Only these are read. Default: all.
        timeout: seconds to wait until the job has begun.
        share: readers of this host and user that read the same job, type and names receive each version once: one of them reads it for
            all, and the others map its memory. What is asked for with ``exactly`` is not shared.

    Raises:
        VersionTimeoutError: no server answers, the job has not begun, or the certificate does not cover it.
        ConfigError: a value is invalid, or no tensor has such a name.
    """
    servers, certs = _fleet(fleet)
    names = [only] if isinstance(only, str) else None if only is None else list(only)
    if names is not None and not all(names or [""]):
        raise ConfigError("only= has no name; leave it out to read all tensors")
    session = _paraft.Reader(servers=servers, job=job, dtype=dtype, only=names, timeout=_seconds(timeout), certs=certs)
    if share:
        session.share()
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
    elif isinstance(fleet, str) and ":" not in fleet:
        raise ConfigError(f"{fleet}: there is no such folder of a run; servers are named as host:port,host:port")
    servers = fleet.split(",") if isinstance(fleet, str) else list(fleet)
    servers = [server.strip() for server in servers if server.strip()]
    if not servers:
        raise ConfigError("no fleet is named: give its servers or a run's folder, or set PARAFT_SERVERS")
    return servers, certs


def _seconds(timeout: float, name: str = "timeout") -> float:
    if not (math.isfinite(timeout) and 0 < timeout <= 86_400):
        raise ConfigError(f"{name}={timeout}: it is a time in seconds, above 0, and at most 86400")
    return float(timeout)


def _check_step(name: str, step: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= 1 << 53:
        raise ConfigError(f"{name}={step!r} is no step: it is a whole number from 0")


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

    def get(
        self, *, at_least: int = 0, exactly: Optional[int] = None, max_age: Optional[float] = None, timeout: float = 30.0
    ) -> Version:
        """Receives a whole version, and checks it. What the caller uses does not change until :meth:`Version.load_into`.

        A version is named by a step. Without arguments it is the newest, or the one that the next step makes. It is never older than the
        one before. From asyncio: ``await asyncio.to_thread(reader.get)``.

        Args:
            at_least: the version of this step, or a later one.
            exactly: the version of this step. Ask before the job reaches it: versions are kept only for their readers.
            max_age: the version that was the newest at some time in the last ``max_age`` seconds, as a majority of servers confirms: it
                may be the one that this reader has. Where no majority can be asked, there is a ``VersionTimeoutError``.
            timeout: seconds to wait.

        Raises:
            VersionTimeoutError: there was none in time.
            JobEndedError: the job has ended before it.
            VersionNotKeptError: the job has passed the version ``exactly``.
            OtherFoundingError: the job was started again under its name: its versions are other weights.
            MisuseError: another thread uses this reader.
        """
        _check_step("at_least", at_least)
        if exactly is not None:
            _check_step("exactly", exactly)
        if exactly is not None and at_least > exactly:
            raise ConfigError(f"exactly={exactly} is before at_least={at_least}")
        if max_age is not None and (exactly is not None or at_least):
            raise ConfigError("max_age= goes without at_least= and exactly=: it means the newest version")
        max_age = max_age if max_age is None else _seconds(max_age, "max_age")
        return Version(self._session.next(at_least, exactly, max_age, _seconds(timeout)), self._dtype, self._tensors)

    def watch(self, *, every: int = 1, timeout: float = 3600.0) -> Iterator[Version]:
        """Yields the newest version, then each time the next one that is at least ``every`` steps later, and at the job's end its last
        one. Versions in between are left out.

        Args:
            every: steps from one version to the next, from 1.
            timeout: seconds to wait for each.

        Raises:
            VersionTimeoutError: there was none in time; the job has not ended.
            OtherFoundingError: the job was started again under its name.
        """
        _check_step("every", every)
        if every < 1:
            raise ConfigError(f"every={every}; it is from 1")
        version = self.get(timeout=timeout)
        yield version
        while not version.is_last:
            try:
                version = self.get(at_least=version.step + every, timeout=timeout)
            except JobEndedError:
                last = self.get(timeout=timeout)
                if last.step > version.step:
                    yield last
                return
            yield version

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
        #: The newest version when this one had arrived: ``reached - step`` is its age in steps then, as the server knows.
        self.reached: int = version.reached
        #: The job has ended with it.
        self.is_last: bool = version.is_last
        #: Equal for readers that read the same tensors in the same type.
        self.digest: str = f"{version.digest:016x}"
        #: Names the job's state: one that was started again under its name has another.
        self.founding: int = version.founding
        #: Bytes that came over the network for it: fewer if it came as a difference, none if a reader of this host shares it.
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

    def _copy(self, i: int, t: torch.Tensor) -> None:
        import torch

        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[self._dtype]
        if t.dtype == dtype and t.device.type == "cpu" and t.is_contiguous():
            self._version.copy(i, t.data_ptr(), t.numel() * t.element_size())
            if not t.is_inference():
                # As of any change in place: a backward pass that needs the old values must fail.
                torch.autograd.graph.increment_version(t)
        else:
            t.copy_(self._tensor(i))

    def load_into(self, model: torch.nn.Module, *, strict: bool = True) -> None:
        """Copies the weights into a model's own tensors: each keeps its storage, device and type. Nothing is changed unless all fits.

        What the servers do not have stays as it is, such as frozen parameters. Counters of batches (``num_batches_tracked``) beside
        running statistics become the step.

        Args:
            strict: refuse if a tensor of the version is missing in the model; or if a parameter that requires gradients is not in the
                version, or any parameter if none requires them. A parameter under two names is in it if one of them is.
                A reader of some tensors (``only=``) needs ``strict=False``.

        Raises:
            ConfigError: names, shapes or types do not fit; the message has up to ten of them.
        """
        import torch

        if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            model = model.module
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        there: dict[str, torch.Tensor] = {**dict(model.named_buffers()), **model.state_dict(keep_vars=True)}
        shapes = {name: tuple(shape) for name, shape, _ in self._tensors}
        fitting = [name for name in shapes if name in there]
        wrong = [_misfit(name, shapes[name], there[name]) for name in fitting]
        if strict:
            wrong += [f"`{name}` is not in the model" for name in shapes if name not in there]
            held = {id(there[name]) for name in fitting}
            params = [(name, t) for name, t in there.items() if isinstance(t, torch.nn.Parameter)]
            trains = any(t.requires_grad for _, t in params)
            missing = (name for name, t in params if id(t) not in held and (t.requires_grad or not trains))
            wrong += [f"`{name}` is not in the version" for name in missing]
        elif not fitting:
            wrong = ["the model has none of its tensors"]
        wrong = [why for why in wrong if why]
        if wrong:
            more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise ConfigError(f"version {self.step} does not fit the model: {'; '.join(wrong[:10])}{more}")
        inference = any(there[name].is_inference() for name in fitting)
        with torch.inference_mode() if inference else torch.no_grad():
            for i, name in enumerate(shapes):
                if name in there:
                    self._copy(i, there[name])
            for name, t in there.items():
                layer, _, last = name.rpartition("num_batches_tracked")
                if not last and name != layer and layer + "running_mean" in shapes:
                    t.fill_(self.step)

    def __repr__(self) -> str:
        return f"<paraft.Version {self.step}, digest {self.digest}>"


def _misfit(name: str, shape: tuple[int, ...], t: torch.Tensor) -> str:
    """Why a tensor of the model cannot take that of the version; empty: it can."""
    if tuple(t.shape) != shape:
        return f"`{name}` is {list(shape)} in the version, {list(t.shape)} in the model"
    if not t.is_floating_point():
        return f"`{name}` is {t.dtype} in the model, which holds no fractions"
    return f"`{name}` has no memory in the model: it is on `meta`" if t.is_meta else ""
