"""A model as one flat vector: what the servers hold, and where its parameters lie in it.

A parameter of float32 on the CPU, contiguous, *is* a view of the vector: what is pulled is where the model computes, and nothing is
converted on a step's path. Any other (half precision, channels-last, on a GPU) keeps memory of its own and is copied; so does one that is
sharded over the ranks of a group (FSDP2), of which each rank copies its own part.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch.nn.parameter import is_lazy

from .._run import Tensor
from ..errors import ConfigError, MisuseError
from ._group import Group

_LOG = logging.getLogger("paraft")


class Flat:
    """The trained parameters of a model in the order of an optimizer's groups, then its running statistics.

    ``group``: whose ranks the vector belongs to; it lies in memory that they share.

    Attributes:
        values: the vector, on the CPU.
        params: the parameters, in order.
        names: theirs and the statistics'.
        group_values: how many values each of the optimizer's groups has.
        buffers: the running statistics: persistent buffers of floating numbers, all of them finite.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: Optional[Group]) -> None:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module  # its names are the model's
        names = {id(p): name for name, p in model.named_parameters()}
        lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
        if lazy is not None:
            raise ConfigError(f"`{lazy}` has no shape yet (a lazy module): run one batch through the model before prepare()")
        order = {id(p): i for i, p in enumerate(model.parameters())}
        self.params: list[torch.nn.Parameter] = []
        self.names: list[str] = []
        self.group_values: list[int] = []
        for i, of in enumerate(optimizer.param_groups):
            trained = [p for p in of["params"] if p.requires_grad]
            for p in trained:
                if id(p) not in names:
                    raise ConfigError(
                        f"parameter group {i} of the optimizer has a parameter of shape {list(p.shape)} that is not the model's"
                    )
                if not p.is_floating_point():
                    raise ConfigError(f"`{names[id(p)]}` is {p.dtype}: what is trained is of floating numbers; split complex ones")
            trained.sort(key=lambda p: order[id(p)])
            self.params += trained
            self.names += [names[id(p)] for p in trained]
            self.group_values.append(sum(p.numel() for p in trained))
        given = [p for of in optimizer.param_groups for p in of["params"]]
        held = {id(p) for p in given}
        for name, p in model.named_parameters():
            if p.requires_grad and id(p) not in held:
                raise ConfigError(
                    f"`{name}` requires a gradient and is in no parameter group of the optimizer, so that nobody would train it, and each worker "
                    "keep its own: freeze it (requires_grad_(False)), or give it to the optimizer. A run has one optimizer; what another one "
                    "trains (as of a GAN) is another run's model, with servers of its own"
                )
        self._trained = [(names[id(p)], p, p.requires_grad) for p in given if id(p) in names]
        if not self.params:
            raise ConfigError("the optimizer has no parameter that requires a gradient")
        kept = set(model.state_dict(keep_vars=True))
        self.buffers: list[torch.Tensor] = []
        for name, b in model.named_buffers():
            if name in kept and b.is_floating_point() and b.numel():
                if not bool(own(b).isfinite().all()):
                    _LOG.info("`%s` holds infinities: it is a constant, as of a mask, and each worker's own", name)
                    continue
                self.buffers.append(b)
                self.names.append(name)
        tensors = [*self.params, *self.buffers]
        if any(t.numel() == 0 for t in tensors):
            empty = self.names[next(i for i, t in enumerate(tensors) if t.numel() == 0)]
            raise ConfigError(f"`{empty}` has no values: there is nothing to train in it; freeze it (requires_grad_(False))")
        self.sharded = any(is_sharded(p) for p in self.params)
        self._group = group
        self._check_shards()
        shapes, length = [t.shape for t in tensors], sum(t.numel() for t in tensors)
        if self._group is None:
            on_gpu = any(t.is_cuda for t in tensors)
            self.values = torch.empty(length, dtype=torch.float32, pin_memory=on_gpu)
        else:
            self.values = self._group.memory(length)
        self.views = apart(self.values, shapes)
        #: Of each tensor, this rank's part of its place in the vector.
        self.parts = [part(view, t) for view, t in zip(self.views, tensors)]
        self._copied: list[int] = []
        with torch.no_grad():
            for into, tensor in zip(self.parts, tensors):
                if self._group is None or self._group.leads or is_sharded(tensor):
                    into.copy_(own(tensor))
        self.tensors: list[Tensor] = [
            (name, list(t.shape), i < len(self.params)) for i, (name, t) in enumerate(zip(self.names, tensors))
        ]

    def _check_shards(self) -> None:
        if not self.sharded:
            return
        if self._group is None:
            raise ConfigError(
                "the model is sharded (FSDP2, DTensor), and its ranks are one worker: paraft.init(group=...) with the ranks of its mesh"
            )
        shards: list[Any] = [*self.params]
        for name, p in zip(self.names, shards):
            if not is_sharded(p):
                raise ConfigError(
                    f"`{name}` is not sharded, and others are: nobody averages its gradient over the group's ranks. Call fully_shard(model) "
                    "for the whole model, too"
                )
            mesh = sorted(p.device_mesh.mesh.flatten().tolist())
            if mesh != sorted(self._group.ranks):
                raise ConfigError(
                    f"`{name}` is sharded over ranks {mesh}, and the group has {self._group.ranks}: a group's ranks are those of the mesh"
                )

    def attach(self, *, buffers: bool, shared: bool = True) -> None:
        """Makes the parameters views of the vector where they can be; ``buffers``: the running statistics too. ``shared``: what all ranks of
        a group may have in common; else the first rank has it, and the others have weights of their own."""
        tensors = [*self.params, *self.buffers]
        for i, (view, t) in enumerate(zip(self.views, tensors)):
            is_param = i < len(self.params)
            plain = t.dtype == torch.float32 and t.is_cpu and t.is_contiguous() and not is_sharded(t)
            direct = plain and (shared or self._group is None or self._group.leads)
            if direct and (is_param or buffers):
                t.data = view
            elif is_param or buffers:
                self._copied.append(i)
        self._tensors = tensors
        self._versions = [p._version for p in self.params]
        self._at = [(i, view.data_ptr()) for i, view in enumerate(self.views) if i not in self._copied and (i < len(self.params) or buffers)]

    def check(self) -> None:
        """Whether the parameters are still where they were put, and the same ones are trained.

        Raises:
            MisuseError: one was moved, frozen or unfrozen.
        """
        for name, p, trained in self._trained:
            if p.requires_grad is not trained:
                raise MisuseError(
                    f"`{name}` was {'frozen' if trained else 'unfrozen'} after run.prepare(), and the servers do not know: freeze before. "
                    f"To {'stop' if trained else 'begin'} training it in the middle, run.save(), and go on with a new run and resume="
                )
        for i, at in self._at:
            if self._tensors[i].data_ptr() != at:
                raise MisuseError(
                    f"`{self.names[i]}` was given other memory after run.prepare() (model.to(), .half(), load_state_dict(assign=True)): "
                    "do that before"
                )

    def written(self) -> Optional[str]:
        """The name of a parameter that somebody has written to since :meth:`attach`: what is pulled is not counted by torch."""
        now = [p._version for p in self.params]
        if now == self._versions:
            return None
        return next(name for name, a, b in zip(self.names, now, self._versions) if a != b)

    def spread(self) -> None:
        """Copies the vector to the tensors that have memory of their own."""
        if self._copied:
            with torch.no_grad():
                torch._foreach_copy_([own(self._tensors[i].data) for i in self._copied], [self.parts[i] for i in self._copied], True)
            self._synchronize()

    @torch.no_grad()
    def gather(self) -> None:
        """The other way, for workers that move their weights themselves. What is the same on all ranks of a group, its first one gives."""
        given = [i for i in self._copied if self._group is None or self._group.leads or is_sharded(self._tensors[i])]
        if given:
            torch._foreach_copy_([self.parts[i] for i in given], [own(self._tensors[i].data) for i in given])

    def _synchronize(self) -> None:
        device = next((self._tensors[i].device for i in self._copied if self._tensors[i].is_cuda), None)
        if device is not None:
            torch.cuda.current_stream(device).synchronize()  # the vector is the next pull's


def is_sharded(t: torch.Tensor) -> bool:
    """Whether this is a rank's part of a tensor, as FSDP2 leaves parameters."""
    tensor = sys.modules.get("torch.distributed.tensor")  # torch imports it for who shards, and it takes its time
    return tensor is not None and isinstance(t, tensor.DTensor)


def own(t: Any) -> torch.Tensor:
    """What this rank has of it."""
    mine: torch.Tensor = t.to_local() if is_sharded(t) else t
    return mine


def part(whole: torch.Tensor, t: Any) -> torch.Tensor:
    """The part of a whole tensor that this rank has of another one of its shape."""
    if not is_sharded(t):
        return whole
    (chunk,) = t.__create_chunk_list__()
    return whole[tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes))]


def apart(values: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """The parts of a vector as tensors that know nothing of each other: to pickle or save one writes its own values, where that of
    an ordinary view would write the whole vector."""
    kind: Any = type("Values", (ctypes.c_float * values.numel(),), {})
    memory = kind.from_address(values.data_ptr())
    memory.values = values  # kept as long as any part is
    parts, at = [], 0
    for shape in shapes:
        part = torch.frombuffer(memory, dtype=torch.float32, count=shape.numel(), offset=at)
        parts.append(part.view(shape))
        at += 4 * shape.numel()
    return parts


def staged(gradient: torch.Tensor, stage: Optional[torch.Tensor]) -> torch.Tensor:
    """A gradient as the servers take it: contiguous float32 on the CPU. ``stage``: memory for it, kept from step to step."""
    if stage is None:
        stage = torch.empty(gradient.shape, dtype=torch.float32, pin_memory=gradient.is_cuda)
    return stage.copy_(gradient)
