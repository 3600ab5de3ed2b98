"""Training data that the servers lease out. It is elastic: any present worker takes the next chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Optional

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from .._run import Run
from ..errors import ConfigError, MisuseError


class LeasedSampler(Sampler[list[int]]):
    """Batches of chunks that the servers lease out, for a ``DataLoader``::

        sampler = paraft.torch.LeasedSampler(run, dataset, batch_size=64, epochs=10)      # before run.prepare()
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(10):
            for x, y in loader: ...

    An epoch belongs to the fleet: every sample is trained at least once, whichever workers join and leave, and
    exactly once if no worker is lost. A chunk counts as trained when its last push is acknowledged; a lost worker's
    chunk goes to another. When a job resumes, or a worker returns, the script need not do anything: the servers know
    what is left.

    A chunk is 16 batches. In a group each rank gets ``batch_size`` samples of it at a time; if the last ones do not
    divide, some are trained by two ranks.

    With ``num_workers`` a ``DataLoader`` asks for batches beyond the chunk: use :class:`LeasedLoader` then.

    Args:
        run: a run of :func:`paraft.init`, not prepared.
        dataset: map-style, with a length.
        batch_size: samples per batch; a chunk's last one may be shorter.
        epochs: of the job.

    Raises:
        ConfigError: there is nothing to lease, or the run already has a model.
    """

    def __init__(self, run: Run, dataset: Sized, *, batch_size: int, epochs: int) -> None:
        if run._session is not None:
            raise ConfigError("make the sampler before run.prepare(): the servers are told of the data when the job begins")
        if len(dataset) == 0:
            raise ConfigError("the data set is empty")
        self._run = run
        group = run._group
        self._ranks, self._rank = (1, 0) if group is None else (len(group.ranks), group.place_inside)
        #: Samples per minibatch of a worker, over all its ranks.
        self._batch = batch_size * self._ranks
        self._length = len(dataset)
        settings = ['train.sampler="leased"', f"train.batch={self._batch}", f"train.epochs={epochs}"]
        run._leased = {"settings": settings, "samples": len(dataset)}

    def chunks(self) -> Iterator[list[list[int]]]:
        """The batches of each chunk of the fleet's current epoch that this worker gets. Train them before asking for
        the next chunk."""
        session = self._run._joined()
        first: Optional[int] = None
        while not self._run.over:
            chunk = session.chunk()
            if chunk is None:
                raise MisuseError(
                    "a batch is asked for before each of the last chunk's had its optimizer.step(). Where gradients are accumulated, a batch "
                    "is what one step trains on: split it in the loop; a loop over leased data is not left before its end; a DataLoader with "
                    "num_workers reads ahead: use paraft.torch.LeasedLoader"
                )
            epoch, samples = chunk
            first = epoch if first is None else first
            if epoch != first:
                return
            session.prepared()
            yield [self._mine(samples[i : i + self._batch]) for i in range(0, len(samples), self._batch)]

    def _mine(self, batch: list[int]) -> list[int]:
        """This rank's share of a minibatch, as large as any other's: if it does not divide, some samples are used
        twice."""
        share = -(-len(batch) // self._ranks)
        return [batch[i % len(batch)] for i in range(self._rank * share, (self._rank + 1) * share)]

    def __iter__(self) -> Iterator[list[int]]:
        for batches in self.chunks():
            moves = self._run._moves
            for batch in batches:
                yield batch
                if self._run._moves != moves:
                    break  # the rest of the chunk belongs to another worker

    def __len__(self) -> int:
        """The approximate number of this worker's batches in an epoch."""
        share = -(-self._length // self._run.workers)
        return -(-share // self._batch)


class LeasedLoader(IterableDataset[Any]):
    """A ``DataLoader`` over leased chunks whose ``num_workers`` read ahead within each chunk: see
    :class:`LeasedSampler`::

        loader = paraft.torch.LeasedLoader(run, dataset, batch_size=64, epochs=10, num_workers=2)

    It is an ``IterableDataset`` of batches, for frameworks that accept only a stock ``DataLoader``::

        DataLoader(paraft.torch.LeasedLoader(run, dataset, batch_size=64, epochs=10), batch_size=None)

    Args:
        run: see :class:`LeasedSampler`, as for ``batch_size`` and ``epochs``.
        dataset: map-style.
        options: of ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory``, ...
    """

    def __init__(
        self,
        run: Run,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        epochs: int,
        **options: Any,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise ConfigError("leased chunks are numbers of samples: the data set needs a length (map-style)")
        self._run = run
        self.sampler = LeasedSampler(run, dataset, batch_size=batch_size, epochs=epochs)
        self._batches: list[list[int]] = []
        # Its workers persist from chunk to chunk.
        options.setdefault("persistent_workers", options.get("num_workers", 0) > 0)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=_Of(self._batches), **options)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise MisuseError(
                "a DataLoader's workers have no run: give num_workers to the LeasedLoader, and leave it out of the DataLoader around it"
            )
        for batches in self.sampler.chunks():
            self._batches[:] = batches
            moves = self._run._moves
            for batch in self._loader:
                yield batch
                if self._run._moves != moves:
                    break

    def __len__(self) -> int:
        return len(self.sampler)


class _Of(Sampler[list[int]]):
    def __init__(self, batches: list[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(self._batches))

    def __len__(self) -> int:
        return len(self._batches)
