"""Lightning's Trainer in a job: ``Trainer(strategy=paraft.lightning.ParaftStrategy())``; the rest of the script stays
as it is.

It supports both packages, ``lightning`` and ``pytorch_lightning``: it uses the one that the script has imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Optional

import torch

from ._run import Run, init
from .errors import ConfigError, MisuseError

__all__ = ["ParaftStrategy"]

_OLD_NAME = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_NAME = "pytorch_lightning" if _OLD_NAME else "lightning.pytorch"
#: Untyped, so that type checking this module needs neither package.
pl: Any = importlib.import_module(_NAME)
_environments: Any = importlib.import_module(f"{_NAME}.plugins.environments")
_helpers: Any = importlib.import_module(f"{_NAME}.utilities.model_helpers")


class _Place(_environments.ClusterEnvironment):  # type: ignore[misc]
    """A worker's place in the job, for Lightning."""

    creates_processes_externally = True
    main_address = property(lambda self: os.environ.get("MASTER_ADDR", "127.0.0.1"))
    main_port = property(lambda self: int(os.environ.get("MASTER_PORT", "0")))

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._run.workers

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._run.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return next((int(os.environ[n]) for n in ("PARAFT_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID") if n in os.environ), 0)

    def node_rank(self) -> int:
        return 0


class _Ends(pl.Callback):  # type: ignore[misc]
    """Ends the run before callbacks that average weights write theirs to the module: ``run.finish()`` brings the servers'."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        swa = pl.callbacks.StochasticWeightAveraging
        # Behind the last step SWA passes over the samples once more, for the statistics of BatchNorm.
        if any(isinstance(c, swa) and c._max_epochs != -1 and trainer.current_epoch == c.swa_end + 1 for c in trainer.callbacks):
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        front = self._run._front()
        if self._run.is_first and trainer.checkpoint_callbacks and not self._run._finished and hasattr(front, "keep_state"):
            front.keep_state()
        self._run.finish()


class ParaftStrategy(pl.strategies.ParallelStrategy):  # type: ignore[misc]
    """A worker of a job, on one device.

    ``Trainer.fit`` joins the job and, at its end, waits for the other workers. The servers apply the Trainer's
    ``gradient_clip_val`` to the mean gradient; each worker accumulates batches; ranks share the samples; worker 0
    writes checkpoints.

    Workers wait for each other only within a step. So operations on all workers at once, ``self.log(...,
    sync_dist=True)`` and ``EarlyStopping``, are refused if there are several workers, unless the script has created a
    process group of ``torch.distributed``. Its collectives serve them, and fail if a worker is lost.

    Args:
        run: of :func:`paraft.init`. Default: ``paraft.init()``.
        options: of :func:`paraft.torch.prepare`.

    Raises:
        ConfigError: no servers are named; at ``fit``, what the module or the Trainer asks for cannot be done in a job.
    """

    strategy_name = "paraft"
    if TYPE_CHECKING:
        optimizers: list[Any]

    def __init__(self, run: Optional[Run] = None, **options: Any) -> None:
        self.run = run if run is not None else init()
        self._options = options
        super().__init__(cluster_environment=_Place(self.run))
        pl.utilities.rank_zero.rank_zero_only.rank = self.run.rank

    # ---- one device, and a share of the samples ----

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        device: torch.device = devices[self.local_rank % len(devices)]
        return device

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning gives each worker its share of the samples."""
        return self.run.workers > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.run.workers, "rank": self.run.rank}

    # ---- the job ----

    def setup_optimizers(self, trainer: Any) -> None:
        """Joins the job, with the optimizer that the module's schedulers use."""
        super().setup_optimizers(trainer)
        if not self.optimizers:
            raise ConfigError("configure_optimizers gives no optimizer, and a job trains with one, or several")
        if self.run._leased:
            raise ConfigError("leased samples: Lightning asks for a batch ahead and ends an epoch by a loader's length; use its own loaders")
        stops = [c for c in trainer.callbacks if isinstance(c, pl.callbacks.EarlyStopping)]
        if stops and self.run.workers > 1 and not _group():
            raise ConfigError(f"EarlyStopping: each of {self.run.workers} workers would decide alone by the samples that it has seen; {_REMEDY}")
        options = dict(self._options)
        clips = trainer.gradient_clip_val
        # A module that clips itself is given the Trainer's bound, and asks the servers for the mean's norm.
        itself = _helpers.is_overridden("configure_gradient_clipping", self.lightning_module)
        if clips and not itself and options.get("apply") != "worker":
            name = "clip_value" if trainer.gradient_clip_algorithm == "value" else "clip_norm"
            if options.setdefault(name, float(clips)) != clips:
                raise ConfigError(f"the strategy has {name}={options[name]}, and the Trainer gradient_clip_val={clips}: name one")
            trainer.gradient_clip_val = None  # Lightning would clip before the mean is computed
        # For `fit(ckpt_path=...)`: Lightning loads it into the optimizer later, after the servers' start.
        found = getattr(trainer._checkpoint_connector, "_loaded_checkpoint", None) or {}
        states = found.get("optimizer_states") or []
        for optimizer, state in zip(self.optimizers, states):
            optimizer.load_state_dict(state)
        self._loaded = bool(states)
        averages = tuple(getattr(pl.callbacks, n) for n in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(pl.callbacks, n))
        if any(isinstance(c, averages) for c in trainer.callbacks):
            trainer.callbacks.insert(0, _Ends(self.run))
        several = len(self.optimizers) > 1
        self.run.prepare(self.model, self.optimizers if several else self.optimizers[0], **options)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self.run._finished:
            return closure()  # SWA's last pass, which has no gradients

        def told() -> Any:
            loss = closure()
            if loss is not None:
                self.run.log(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            return loss

        result = super().optimizer_step(optimizer, told, model, **kwargs)
        if self.run.over:
            self.lightning_module.trainer.should_stop = True
        return result

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Batches that are only accumulated."""
        with self.run.no_sync():
            yield

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if not self._loaded:
            super().load_optimizer_state_dict(checkpoint)

    def on_train_end(self) -> None:
        self.run.finish()

    def on_exception(self, exception: BaseException) -> None:
        self.run.close()

    # ---- operations on all workers ----

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean (or ``reduce_op``) over all workers, by ``torch.distributed``.

        Raises:
            MisuseError: there is no process group.
        """
        if self.run.workers == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        if _group():
            mean = reduce_op in ("mean", "avg")
            total = tensor.float() if mean and not tensor.is_floating_point() else tensor.clone()
            how = getattr(torch.distributed.ReduceOp, "SUM" if mean else str(reduce_op).upper()) if isinstance(reduce_op, str) else reduce_op
            torch.distributed.all_reduce(total, how, group=group)
            return total / torch.distributed.get_world_size(group) if mean else total
        if not tensor.is_floating_point() and reduce_op == "sum":
            return tensor * self.run.workers  # the length of a loader, which the sampler makes equal on all workers
        raise MisuseError(f"sync_dist=True: a value cannot be averaged over {self.run.workers} workers; {_REMEDY}, or log each worker's own")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """The decision of all workers with a process group, otherwise this worker's, for example whether worker 0
        writes a checkpoint."""
        if not _group():
            return decision
        agreed: bool = super().reduce_boolean_decision(decision, all)
        return agreed

    def barrier(self, name: Optional[str] = None) -> None:
        """Waits only with a process group. Without one, prepare shared data before the workers start."""
        if _group():
            torch.distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """With a process group; otherwise each worker keeps its own object, for example the folder that only worker 0
        writes to."""
        if _group():
            box = [obj]
            torch.distributed.broadcast_object_list(box, src)
            return box[0]
        return obj

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """With a process group.

        Raises:
            MisuseError: there is none.
        """
        if self.run.workers > 1 and not _group():
            raise MisuseError(f"all_gather: {self.run.workers} workers do not see each other's values; {_REMEDY}")
        return super().all_gather(tensor, group, sync_grads)


_REMEDY = 'call torch.distributed.init_process_group("gloo") before the Trainer is made'


def _group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
