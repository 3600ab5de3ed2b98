"""Hugging Face's Trainer in a job::

    import paraft.transformers

    run = paraft.transformers.init()                # before TrainingArguments
    trainer = Trainer(model, TrainingArguments(...), train_dataset=..., eval_dataset=...)
    paraft.transformers.prepare(run, trainer).train()
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from ._run import Run
from ._run import init as _init
from .accelerate import alone
from .errors import ConfigError, DataError
from .torch._mean import OnMean
from .torch._steps import OnServers

__all__ = ["init", "prepare"]

#: Untyped, so that type checking this module does not need the package.
_transformers: Any = importlib.import_module("transformers")

_LOG = logging.getLogger("paraft")

#: Seconds in which the best checkpoint must be there.
_WAIT = 120.0


def init(*args: Any, **options: Any) -> Run:
    """:func:`paraft.init`, which then removes torchrun's variables from this process's environment: for
    ``transformers`` and ``accelerate`` each worker is a single process. Call it before ``TrainingArguments(...)`` or
    ``Accelerator()``."""
    run = _init(*args, **options)
    alone()
    return run


def prepare(run: Run, trainer: Any, **options: Any) -> Any:
    """Makes this ``Trainer``, or an object of a subclass, train in a job. Returns it.

    ``trainer.train()`` joins the job, and waits for the other workers at its end. ``max_grad_norm`` clips the mean
    gradient; each worker accumulates batches; ranks share the training set's samples; every worker evaluates the whole
    evaluation set; worker 0 saves, logs and shows progress.

    Args:
        run: of :func:`init`.
        trainer: it must not have trained yet.
        options: of :func:`paraft.torch.prepare`. ``clip_norm`` takes the place of ``max_grad_norm``: a step is a round
            trip shorter, and the log has no ``grad_norm``.

    Raises:
        ConfigError: Accelerate has created a process group, or a job does not support the arguments.
    """
    args, state = trainer.args, trainer.accelerator.state
    if trainer.accelerator.num_processes > 1:
        raise ConfigError(
            f"Accelerate has made a process group of {trainer.accelerator.num_processes}: call run = paraft.transformers.init() before "
            "TrainingArguments(...)"
        )
    if run._leased:
        raise ConfigError("leased samples: the Trainer asks for batches ahead and ends an epoch by a loader's length; use its own loaders")
    if args.n_gpu > 1:
        raise ConfigError(f"the Trainer would use {args.n_gpu} GPUs in this process: give each worker one, with CUDA_VISIBLE_DEVICES")
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if run.workers > 1 and args.average_tokens_across_devices and counts:
        _LOG.warning(
            "average_tokens_across_devices: each worker divides its loss by its own number of tokens, and the servers take the mean; under DDP the "
            "Trainer divides by the tokens of all. With samples of unequal length these differ. (False says that you know)"
        )
    if "clip_norm" in options or "clip_value" in options:
        args.max_grad_norm = 0.0
        trainer.accelerator.clip_grad_norm_ = _unasked  # for the log the Trainer asks for the norm, a round trip
    trainer.accelerator.no_sync = lambda model: run.no_sync()
    # The Trainer checks these before it saves, logs or shows progress.
    for of in (args.distributed_state, state):
        of.process_index = run.rank
        of.local_process_index = int(os.environ.get("PARAFT_LOCAL_RANK", run.rank))
    if run.workers > 1:
        trainer._get_train_sampler = _shared(run, args, trainer, trainer._get_train_sampler)
        for name in ("_save_rng_state", "_load_rng_state"):
            setattr(trainer, name, _by_rank(run, args, getattr(trainer, name)))
        if args.load_best_model_at_end:
            trainer._load_best_model = _when_saved(run, trainer, trainer._load_best_model)
    callback = _Callback(run, options)
    trainer.training_step = callback.watch(trainer.training_step)
    trainer.add_callback(callback)
    return trainer


def _unasked(*args: Any, **options: Any) -> None:
    """In place of the norm of gradients."""


def _shared(run: Run, args: Any, trainer: Any, sampler: Callable[..., Any]) -> Callable[..., Any]:
    def shared(*given: Any) -> Any:
        own = sampler(*given)
        if own is None:
            _LOG.warning(
                "the training set is iterable: each worker trains on all that it yields; share it out with "
                "datasets.distributed.split_dataset_by_node(dataset, run.rank, run.workers)"
            )
            return None
        if not isinstance(own, (RandomSampler, SequentialSampler)):
            raise ConfigError(f"train_sampling_strategy={args.train_sampling_strategy!r}: {run.workers} workers share \"random\" or \"sequential\"")
        shuffle = isinstance(own, RandomSampler)
        seed = args.seed if args.data_seed is None else args.data_seed
        dataset = given[0] if given else trainer.train_dataset
        return DistributedSampler(dataset, run.workers, run.rank, shuffle=shuffle, seed=seed)

    return shared


def _by_rank(run: Run, args: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """The state of random numbers is each worker's own: as of several processes its file is named by rank."""

    @functools.wraps(call)
    def ranked(*given: Any, **named: Any) -> Any:
        of = args.distributed_state
        before, of.num_processes = of.num_processes, run.workers
        try:
            return call(*given, **named)
        finally:
            of.num_processes = before

    return ranked


def _when_saved(run: Run, trainer: Any, load: Callable[[], Any]) -> Callable[[], Any]:
    """Loads worker 0's best checkpoint, in a folder that all workers share, once it is whole: no barrier of all workers says
    when. All know which it is, because in lock-step they evaluate the same weights."""

    @functools.wraps(load)
    def loads() -> Any:
        state, until = trainer.state, time.monotonic() + _WAIT
        while not run.is_first and not _is_saved(state):
            if time.monotonic() > until:
                raise DataError(
                    f"{state.best_model_checkpoint}: worker 0's best checkpoint is not here after {_WAIT:g} s: with load_best_model_at_end all "
                    "workers need one output_dir"
                )
            time.sleep(0.1)
        return load()

    return loads


def _is_saved(state: Any) -> bool:
    """Whether the best checkpoint is there, and this run's: the Trainer's state is the last that is written of one."""
    try:
        with open(os.path.join(state.best_model_checkpoint, "trainer_state.json")) as file:
            saved = json.load(file)
    except (OSError, ValueError):
        return False
    return bool(saved["best_global_step"] == state.best_global_step and saved["best_metric"] == state.best_metric)


class _Callback(_transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, run: Run, options: dict[str, Any]) -> None:
        self._run = run
        self._options = options
        self._loss: Any = 0.0

    def _tables(self) -> list[Any]:
        front: Any = self._run._front()
        return front.tables.all if isinstance(front, OnServers) else []

    def watch(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """A training step that records its loss."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            self._loss = self._loss + loss.detach()
            if isinstance(self._run._front(), OnMean):
                self._run.log(self._loss)  # the Trainer asks for the gradients' norm before on_pre_optimizer_step()
            return loss

        return watched

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        self._run.prepare(model, optimizer, **self._options)
        if args.load_best_model_at_end and (tables := self._tables()):
            raise ConfigError(
                f"load_best_model_at_end: the rows of table `{tables[0].name}` are on the servers, and the Trainer's checkpoints do not have them; "
                "run.save() does"
            )
        if args.load_best_model_at_end and self._run.workers > 1 and self._run.mode != "bsp":
            raise ConfigError(
                f"load_best_model_at_end in mode {self._run.mode}: each worker evaluates other weights, and would load another checkpoint; load it "
                "after trainer.train(), where run.is_first"
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not isinstance(self._run._front(), OnMean):
            self._run.log(self._loss)
        self._loss = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run.over:
            control.should_training_stop = True
        self._ends(args, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ends(args, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end and not self._run.is_first and state.best_global_step:
            state.best_model_checkpoint = os.path.join(args.output_dir, f"checkpoint-{state.best_global_step}")

    def _ends(self, args: Any, control: Any) -> None:
        """After the last step, whatever ended training: later evaluations, saves and loads are the Trainer's."""
        # Rows are read from the servers, also by the last evaluation.
        if control.should_training_stop and not self._run._finished and not self._tables():
            front = self._run._front()
            if args.should_save and args.save_strategy != "no" and not args.save_only_model and hasattr(front, "keep_state"):
                front.keep_state()  # the Trainer saves the optimizer after its last step
            self._run.finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.finish()
