"""Hugging Face's Trainer in a job::

    import paraft.transformers

    run = paraft.transformers.init()                # before TrainingArguments
    trainer = Trainer(model, TrainingArguments(...), train_dataset=..., eval_dataset=...)
    paraft.transformers.prepare(run, trainer).train()
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from ._run import Run
from ._run import init as _init
from .errors import ConfigError
from .torch._mean import OnMean

__all__ = ["init", "prepare"]

#: Untyped, so that type checking this module does not need the package.
_transformers: Any = importlib.import_module("transformers")

_LOG = logging.getLogger("paraft")

#: With these variables Accelerate would detect several processes, and wrap the model in DDP.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")


def init(*args: Any, **options: Any) -> Run:
    """:func:`paraft.init`, which then removes torchrun's variables from this process's environment: for
    ``transformers`` and ``accelerate`` each worker is a single process. Call it before ``TrainingArguments(...)`` or
    ``Accelerator()``."""
    run = _init(*args, **options)
    for name in _TORCHRUN:
        os.environ.pop(name, None)
    return run


def prepare(run: Run, trainer: Any, **options: Any) -> Any:
    """Makes this ``Trainer``, or an object of a subclass, train in a job. Returns it.

    ``trainer.train()`` joins the job, and waits for the other workers at its end. ``max_grad_norm`` becomes the
    servers' ``clip_norm``, which clips the mean; each worker accumulates batches; ranks share the training set's
    samples; every worker evaluates the whole evaluation set; worker 0 saves, logs and shows progress.

    Args:
        run: of :func:`init`.
        trainer: it must not have trained yet.
        options: of :func:`paraft.torch.prepare`.

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
    if getattr(trainer.accelerator, "scaler", None) is not None:
        raise ConfigError("fp16=True: Accelerate's GradScaler decides alone to skip a step, and the other workers would wait; use bf16=True")
    if args.load_best_model_at_end and run.workers > 1:
        raise ConfigError(
            "load_best_model_at_end: worker 0 alone has the checkpoints; load the best one after trainer.train(), where run.is_first"
        )
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if run.workers > 1 and args.average_tokens_across_devices and counts:
        _LOG.warning(
            "average_tokens_across_devices: each worker divides its loss by its own number of tokens, and the servers take the mean; under DDP the "
            "Trainer divides by the tokens of all. With samples of unequal length these differ. (False says that you know)"
        )
    if options.get("apply") != "worker":
        if args.max_grad_norm:
            options.setdefault("clip_norm", float(args.max_grad_norm))
        args.max_grad_norm = 0.0  # the Trainer would clip before the mean is computed
        # The Trainer computes the gradient norm by clipping to infinity, which would change gradients pushed before.
        options.setdefault("overlap", False)
    # The Trainer checks these before it saves, logs or shows progress.
    for of in (args.distributed_state, state):
        of.process_index = run.rank
        of.local_process_index = int(os.environ.get("PARAFT_LOCAL_RANK", run.rank))
    if run.workers > 1:
        trainer._get_train_sampler = _shared(run, args, trainer, trainer._get_train_sampler)
    callback = _Callback(run, options)
    trainer.training_step = callback.watch(trainer.training_step)
    trainer.add_callback(callback)
    return trainer


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


class _Callback(_transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, run: Run, options: dict[str, Any]) -> None:
        self._run = run
        self._options = options
        self._loss: Any = 0.0

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
        self._run.prepare(model, getattr(optimizer, "optimizer", optimizer), **self._options)

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

    def _ends(self, args: Any, control: Any) -> None:
        """After the last step, whatever ended training: later evaluations, saves and loads are the Trainer's."""
        if control.should_training_stop and not self._run._finished:
            front = self._run._front()
            if args.should_save and args.save_strategy != "no" and hasattr(front, "keep_state"):
                front.keep_state()  # the Trainer saves the optimizer after its last step
            self._run.finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.finish()
