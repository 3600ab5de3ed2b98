"""Accelerate in a job: ``accelerator = paraft.accelerate.Accelerator(...)``; the rest of the script stays as it is."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import weakref
from collections.abc import Iterator
from typing import Any, Optional

import torch

from ._run import Run, init
from .errors import ConfigError, MisuseError

__all__ = ["Accelerator"]

#: Untyped, so that type checking this module does not need the package.
_package: Any = importlib.import_module("accelerate")
_utils: Any = importlib.import_module("accelerate.utils")

#: With these variables Accelerate would detect several processes, and create a process group.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
_OPTIONS = ("apply", "clip_norm", "clip_value", "overlap", "encoding", "constraints")


def alone() -> None:
    """For Accelerate this process is the only one from now on."""
    for name in _TORCHRUN:
        os.environ.pop(name, None)


def _group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _on_all(name: str) -> Any:
    """An operation on the values of all workers."""

    def operates(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.run.workers > 1 and not _group():
            raise MisuseError(
                f"{name}: {self.run.workers} workers do not see each other's values; call torch.distributed.init_process_group(\"gloo\") before the "
                "Accelerator is made, or use each worker's own"
            )
        return getattr(_package.Accelerator, name)(self, *args, **kwargs)

    return operates


class Accelerator(_package.Accelerator):  # type: ignore[misc]
    """Accelerate's ``Accelerator``, whose :meth:`prepare` joins the job once it has a model and its optimizer.

    Loaders, schedulers, accumulation and clipping are as under DDP, and ``is_main_process`` is worker 0. Workers wait for
    each other only within a step. So operations on all workers at once, such as ``gather_for_metrics``, are refused if
    there are several workers, unless the script has created a process group of ``torch.distributed`` before. Its
    collectives serve them, and ``wait_for_everyone``, and fail if a worker is lost.

    Args:
        args, kwargs: of ``accelerate.Accelerator``, and of :func:`paraft.torch.prepare`.
        run: of :func:`paraft.init`. Default: ``paraft.init()``.

    Raises:
        ConfigError: no servers are named, or the process group is of another size.
    """

    def __init__(self, *args: Any, run: Optional[Run] = None, **kwargs: Any) -> None:
        self.run = run if run is not None else init()
        self._options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        by_servers = self.run.workers > 1 and not _group()
        if not _group():
            alone()
        if by_servers:
            config = kwargs.setdefault("dataloader_config", _utils.DataLoaderConfiguration())
            if config.dispatch_batches:
                raise ConfigError("dispatch_batches=True: worker 0 cannot send batches to the others: without it each reads its own")
            config.dispatch_batches = False
            # The order of samples, which Accelerate's processes send each other.
            if not config.use_seedable_sampler:
                config.use_seedable_sampler, config.data_seed = True, config.data_seed or 0
        super().__init__(*args, **kwargs)
        if by_servers:
            for state in (_package.PartialState(), self.state):
                state.num_processes, state.process_index = self.run.workers, self.run.rank
                state.local_process_index = int(os.environ.get("PARAFT_LOCAL_RANK", self.run.rank))
        elif self.num_processes != self.run.workers:
            raise ConfigError(
                f"the process group has {self.num_processes} processes, and the job {self.run.workers} workers: make the group of all workers "
                "before the Accelerator, or none"
            )
        mine = weakref.ref(self)

        def ends() -> None:
            accelerator = mine()
            if accelerator is not None and not hasattr(sys, "last_type"):
                accelerator._finish()

        atexit.register(ends)

    # ---- the job ----

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        # DDP would average the gradients too.
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode or self.run.workers > 1)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's; then joins the job with all optimizers so far, and the models that they train.

        Raises:
            MisuseError: an optimizer came after the first ones.
        """
        known = len(self._optimizers)
        prepared = super().prepare(*args, **kwargs)
        if len(self._optimizers) > known and known:
            raise MisuseError("an optimizer after the first: give accelerator.prepare() all models, then all optimizers in one call")
        trained = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        models = [m for m in self._models if any(id(p) in trained for p in m.parameters())]
        if self._optimizers and models and self.run._session is None and not self.run._closed:
            several = len(self._optimizers) > 1
            self.run.prepare(models if len(models) > 1 else models[0], self._optimizers if several else self._optimizers[0], **self._options)
        return prepared

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Batches that are only accumulated."""
        with self.run.no_sync():
            yield

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Accelerate's, before the job has begun.

        Raises:
            MisuseError: the servers have the weights and the optimizer's state.
        """
        if self.run._session is not None:
            raise MisuseError("load_state() behind prepare(): the weights are the servers'. Resume with paraft.init(resume=...) and run.save()")
        super().load_state(*args, **kwargs)

    def end_training(self) -> None:
        """Waits for the other workers' loops; then Accelerate's."""
        self._finish()
        super().end_training()

    def _finish(self) -> None:
        if self.run._session is not None:
            self.run.finish()

    gather, gather_for_metrics, reduce, pad_across_processes = map(_on_all, ("gather", "gather_for_metrics", "reduce", "pad_across_processes"))
