"""Training data that the servers give out: elastic, since whoever is there takes the next chunk."""

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

    Each epoch is the fleet's: every sample is trained at least once by somebody, whoever comes and goes, and exactly once if nobody is
    lost. A chunk counts as trained when its last push is acknowledged; what a lost worker held goes to another. Where a job is gone on
    with, or a worker comes back, there is nothing to do: the servers know what is left.

    A chunk is 16 batches. In a group each rank gets ``batch_size`` samples of it at a time; where the last ones do not divide, some are
    trained by two ranks.

    With ``num_workers`` a ``DataLoader`` asks for batches ahead, beyond the chunk: take :class:`LeasedLoader` then.

    Args:
        run: of :func:`paraft.init`, not prepared.
        dataset: map-style; its length counts.
        batch_size: samples of a batch; a chunk's last may be shorter.
        epochs: of the job.

    Raises:
        ConfigError: there is nothing to lease, or the run has a model already.
    """

    def __init__(self, run: Run, dataset: Sized, *, batch_size: int, epochs: int) -> None:
        if run._session is not None:
            raise ConfigError("make the sampler before run.prepare(): the servers are told of the data when the job begins")
        if len(dataset) == 0:
            raise ConfigError("the data set is empty")
        self._run = run
        group = run._group
        self._ranks, self._rank = (1, 0) if group is None else (len(group.ranks), group.place_inside)
        #: A worker's, of all its ranks.
        self._batch = batch_size * self._ranks
        self._length = len(dataset)
        settings = ['train.sampler="leased"', f"train.batch={self._batch}", f"train.epochs={epochs}"]
        run._leased = {"settings": settings, "samples": len(dataset)}

    def chunks(self) -> Iterator[list[list[int]]]:
        """The batches of each chunk that this worker gets of the epoch that the fleet is in. They are to be trained before the next is
        asked for."""
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
        """This rank's share of a minibatch, as large as any other's: where it does not divide, some samples are taken twice."""
        share = -(-len(batch) // self._ranks)
        return [batch[i % len(batch)] for i in range(self._rank * share, (self._rank + 1) * share)]

    def __iter__(self) -> Iterator[list[int]]:
        for batches in self.chunks():
            moves = self._run._moves
            for batch in batches:
                yield batch
                if self._run._moves != moves:
                    break  # what is left of the chunk is another worker's

    def __len__(self) -> int:
        """About so many batches are this worker's in an epoch."""
        share = -(-self._length // self._run.workers)
        return -(-share // self._batch)


class LeasedLoader(IterableDataset[Any]):
    """A ``DataLoader`` over leased chunks whose ``num_workers`` read ahead within each: see :class:`LeasedSampler`::

        loader = paraft.torch.LeasedLoader(run, dataset, batch_size=64, epochs=10, num_workers=2)

    It is an ``IterableDataset`` of batches, for what takes nothing but a stock ``DataLoader``::

        DataLoader(paraft.torch.LeasedLoader(run, dataset, batch_size=64, epochs=10), batch_size=None)

    Args:
        run: as of :class:`LeasedSampler`, as are ``batch_size`` and ``epochs``.
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
        # Its workers stay from chunk to chunk.
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
