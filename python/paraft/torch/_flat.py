"""A model as one flat vector, as the servers hold it, and the places of its parameters in it.

A contiguous float32 parameter on the CPU *is* a view of the vector: pulled weights are in place, and a step converts
nothing. Any other parameter (half precision, channels-last, on a GPU, or with memory shared with another tensor)
keeps its memory and is copied. So is a parameter that is sharded over a group's ranks (FSDP2): each rank copies its
own part.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch.nn.parameter import is_lazy

from .._paraft import WHOLE_BYTES, digest
from .._run import Tensor
from ..errors import ConfigError, MisuseError
from ._group import Group
from ._names import Names
from ._together import Optimizers, owners

_LOG = logging.getLogger("paraft")


#: The names of the mean gradients, before those of their parameters, and of the optimizer's state.
MEAN = "mean gradient of "
STATE = "state of the optimizer"

#: The maximum number of parameter classes on the servers, each with its own options.
MAX_CLASSES = 1024
#: With more groups, those of equal options become one class, because each class has its own buckets.
_FEW_GROUPS = 32


class Flat:
    """The parameters of a model that the servers have, class by class, then its running statistics.

    They have the trained ones. If the script ``freezes`` and unfreezes groups later, they also have those of groups in which all
    are frozen. Others are each worker's own, and stay frozen: those of an adapted model may be many.

    ``group``: the ranks that share the vector's memory. ``state``: only if the workers run the optimizer on the mean
    gradient: the number of values of its state. Then the vector has the mean of the gradients, the running statistics,
    and last the results: the parameters, and this state.

    Attributes:
        values: the vector, on the CPU.
        params: the parameters, in order.
        names: names of parameters and statistics.
        classes: the class of each of the optimizer's groups; -1: the servers have none of its parameters.
        class_values: number of values of each class.
        members: the parameters of each class, by index.
        means: the places of the mean gradient, by parameter.
        state: the place of the optimizer's state.
        results: number of tensors that are results.
        buffers: the running statistics at ``prepare``: persistent, dense floating-point buffers with only finite values.
            :meth:`statistics` has their present values.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Optimizers, group: Optional[Group], state: Optional[int] = None, freezes: bool = False
    ) -> None:
        self._model = names = Names(model)
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(t):
                raise ConfigError(f"`{name}` has no shape yet (a lazy module): run one batch through the model before prepare()")
            if t.is_meta:
                raise ConfigError(f"`{name}` is on the meta device and has no values: load the model's weights, or model.to_empty(), before prepare()")
        order = {id(p): i for i, p in enumerate(model.parameters())}
        self.params: list[torch.nn.Parameter] = []
        for i, of in enumerate(optimizer.param_groups):
            seen: set[int] = set()
            for p in of["params"]:
                if id(p) in seen:
                    raise ConfigError(
                        f"parameter group {i} of the optimizer has `{names.of(p)}` twice: name each parameter once "
                        "(a tied one is the same parameter)"
                    )
                seen.add(id(p))
                if not p.requires_grad:
                    continue
                if p not in names:
                    raise ConfigError(
                        f"parameter group {i} of the optimizer has a parameter of shape {list(p.shape)} that is not the model's"
                    )
                if not p.is_floating_point():
                    raise ConfigError(f"`{names.of(p)}` is {p.dtype}: what is trained is of floating numbers; split complex ones")
                if repeats(p):
                    raise ConfigError(
                        f"`{names.of(p)}` is expanded: several of its values are one in memory, and no optimizer can write them. "
                        "Make it of a copy: nn.Parameter(t.clone())"
                    )
        held = {
            id(p)
            for of in optimizer.param_groups
            for too in (freezes and not any(p.requires_grad for p in of["params"]),)
            for p in of["params"]
            if p.requires_grad or too and p in names and _can_be_held(p)
        }
        self.classes = _classes(optimizer, held)
        self.class_values: list[int] = []
        self.members: list[list[int]] = []
        for c in range(max(self.classes, default=-1) + 1):
            its = [p for of, i in zip(optimizer.param_groups, self.classes) if i == c for p in of["params"] if id(p) in held]
            its.sort(key=lambda p: order[id(p)])
            self.members.append(list(range(len(self.params), len(self.params) + len(its))))
            self.params += its
            self.class_values.append(sum(p.numel() for p in its))
        self.names = [names.of(p) for p in self.params]
        for name, p in model.named_parameters():
            if p.requires_grad and id(p) not in held:
                raise ConfigError(
                    f"`{name}` requires a gradient and is in no parameter group of the optimizer, so that no worker would train it, and each worker "
                    "keep its own: freeze it (requires_grad_(False)), or give it to an optimizer. Several optimizers, as of a GAN: "
                    "run.prepare(model, [first, second])"
                )
        #: Whether groups may be frozen and unfrozen later.
        self.freezes = freezes
        self._others = [(names.of(p), p) for p in model.parameters() if id(p) not in held]
        # The model's hooks hold this: a reference back would keep both, and the run's thread, until a garbage collection.
        self._root = weakref.ref(model)
        self._record_places()
        if not any(p.requires_grad for p in self.params):
            raise ConfigError("the optimizer has no parameter that requires a gradient")
        self.buffers: list[torch.Tensor] = []
        #: Each statistic's place in its module: a script may replace the tensor there.
        self._places: list[tuple[dict[str, Optional[torch.Tensor]], str]] = []
        self._find_buffers(model)
        #: The parameters that the servers do not have.
        self.frozen = [name for name, _ in self._others]
        tensors = [*self.params, *self.buffers]
        if any(t.numel() == 0 for t in tensors):
            empty = self.names[next(i for i, t in enumerate(tensors) if t.numel() == 0)]
            raise ConfigError(f"`{empty}` has no values: there is nothing to train in it; freeze it (requires_grad_(False))")
        self.sharded = any(is_sharded(p) for p in self.params)
        self._group = group
        self._check_shards()
        shapes, count = [t.shape for t in tensors], len(self.params)
        self.tensors: list[Tensor] = [(name, list(t.shape), i < count) for i, (name, t) in enumerate(zip(self.names, tensors))]
        self.results = 0
        if state is not None:
            last = [(STATE, [state], True)] if state else []
            self.results = count + len(last)
            results = [*self.tensors[:count], *last]
            self.tensors = [(MEAN + name, shape, kind) for name, shape, kind in self.tensors[:count]] + self.tensors[count:] + results
            shapes = [torch.Size(shape) for _, shape, _ in self.tensors]
        length = sum(shape.numel() for shape in shapes)
        if self._group is None:
            on_gpu = any(t.is_cuda for t in tensors)
            self.values = torch.empty(length, dtype=torch.float32, device="cpu", pin_memory=on_gpu)
        else:
            self.values = self._group.memory(length)
        self.views = apart(self.values, shapes)
        self.means: list[torch.Tensor] = []
        self.state = self.values[:0]
        if state is not None:
            self.values.zero_()
            n = len(tensors)
            self.means, self.state = self.views[:count], self.views[-1] if state else self.state
            self.views = self.views[n : n + count] + self.views[count:n]
        #: This rank's part of each tensor's place in the vector.
        self.parts = [part(view, t) for view, t in zip(self.views, tensors)]
        self._copied: list[int] = []
        self._sample = 0
        with torch.no_grad():
            for into, tensor in zip(self.parts, tensors):
                if self._group is None or self._group.leads or is_sharded(tensor):
                    into.copy_(own(tensor))

    def _record_places(self) -> None:
        """Records the places of its parameters in the model: wrapping changes the modules' places.

        Raises:
            MisuseError: one is no longer in the model.
        """
        root = self._root()
        if root is None:
            return
        held = set(map(id, self.params))
        missing = set(held)
        holders: set[torch.nn.Module] = set()
        self._expected_places: list[tuple[dict[str, Any], str, Any]] = []
        # From leaves to root: containers of such parameters keep their places too.
        for module in reversed(list(root.modules())):
            its = {key: p for key, p in module._parameters.items() if p is not None and id(p) in held and not is_sharded(p)}
            inner = {key: m for key, m in module._modules.items() if m is not None and m in holders}
            missing.difference_update(map(id, (p for p in module._parameters.values() if p is not None)))
            if its or inner:
                holders.add(module)
            self._expected_places += [(module._parameters, key, p) for key, p in its.items()]
            self._expected_places += [(module._modules, key, m) for key, m in inner.items()]
        for p in self.params:
            if id(p) in missing and not is_sharded(p):
                raise MisuseError(
                    f"`{self._model.of(p)}` was replaced by another parameter, or taken out, after run.prepare(): the servers, and checkpoints, "
                    "have the one of then. Change the model before"
                )

    def known(self) -> dict[str, str]:
        """Maps each name in the model of a parameter that the servers have to their name."""
        return {known: name for name, p in zip(self.names, self.params) for known in self._model.known(p)}

    def name_of(self, t: Optional[torch.Tensor]) -> str:
        """The name of one of the model's tensors; empty if unknown."""
        return "" if t is None else self._model.of(t)

    @property
    def aliases(self) -> dict[str, str]:
        """The additional names of these tensors in the model, with their first names."""
        known = set(self.names)
        return {alias: name for alias, name in self._model.aliases.items() if name in known}

    def _find_buffers(self, model: torch.nn.Module) -> None:
        seen: set[int] = set()
        for module in model.modules():
            for key, b in module._buffers.items():
                if b is None or id(b) in seen or key in module._non_persistent_buffers_set:
                    continue
                seen.add(id(b))
                if not b.is_floating_point() or not b.numel():
                    continue
                name = self._model.of(b)
                if b.layout is not torch.strided:
                    _LOG.info("`%s` is sparse: it is a constant, as of a graph, and each worker's own", name)
                    continue
                if not bool(own(b).to(torch.float32).isfinite().all()):
                    _LOG.info("`%s` holds infinities: it is a constant, as of a mask, and the servers do not hold it", name)
                    continue
                self.buffers.append(self._whole(module._buffers, key, b))
                self._places.append((module._buffers, key))
                self.names.append(name)

    @staticmethod
    def _whole(buffers: dict[str, Optional[torch.Tensor]], key: str, b: torch.Tensor) -> torch.Tensor:
        """A buffer with memory for each value: an ``expand()``ed one cannot be written."""
        if repeats(b):
            b = buffers[key] = b.detach().clone(memory_format=torch.contiguous_format)
        return b

    def statistics(self) -> list[torch.Tensor]:
        """The modules' present running statistics: a script may have replaced tensors.

        Raises:
            MisuseError: one is missing, or has another shape.
        """
        now = []
        for (buffers, key), name, before in zip(self._places, self.names[len(self.params) :], self.buffers):
            b = buffers.get(key)
            if b is None or b.shape != before.shape or not b.is_floating_point():
                is_ = "gone" if b is None else f"{b.dtype} {list(b.shape)}"
                raise MisuseError(
                    f"the buffer `{name}` was {before.dtype} {list(before.shape)} at run.prepare(), and is {is_}: the servers hold as many values "
                    "as then. Register it with persistent=False, or give it its shape before"
                )
            now.append(b if b is before else self._whole(buffers, key, b))
        return now

    def _check_shards(self) -> None:
        if not self.sharded:
            return
        if self._group is None:
            raise ConfigError(
                "the model is sharded (FSDP2, DTensor), and its ranks are one worker: paraft.init(group=...) with the ranks of its mesh"
            )
        if not all(hasattr(p, "__create_chunk_list__") for p in self.params if is_sharded(p)):
            raise ConfigError(f"the model is sharded (FSDP2, DTensor), and torch {torch.__version__} does not say which part a rank has: that takes a newer one")
        shards: list[Any] = [*self.params]
        for name, p in zip(self.names, shards):
            if not is_sharded(p):
                raise ConfigError(
                    f"`{name}` is not sharded, and others are: no rank averages its gradient over the group's ranks. Call fully_shard(model) "
                    "for the whole model, too"
                )
            mesh = sorted(p.device_mesh.mesh.flatten().tolist())
            if mesh != sorted(self._group.ranks):
                raise ConfigError(
                    f"`{name}` is sharded over ranks {mesh}, and the group has {self._group.ranks}: a group's ranks are those of the mesh"
                )

    def check_ties(self) -> None:
        """Checks that each trained value has its own memory.

        Raises:
            ConfigError: two tensors share memory.
        """
        pair = _overlapping([own(t) for t in (*self.params, *self.buffers)], len(self.params))
        if pair is not None:
            a, b = (self.names[i] for i in pair)
            raise ConfigError(
                f"`{a}` and `{b}` share memory (tied by .data, or one is a view of the other), and the servers would train them as two. Tie them "
                f"as one parameter (`{b}` = `{a}`); a transposed one is computed: F.linear(x, weight.t()). prepare(..., apply=\"worker\") keeps "
                "what shares memory"
            )

    def attach(self, *, buffers: bool, shared: bool = True) -> None:
        """Makes the parameters views of the vector if possible; ``buffers``: also the running statistics. ``shared``:
        a group's ranks may share them; otherwise only the first rank uses the views, and the others keep their own
        weights."""
        self._tensors = [*self.params, *self.buffers]
        for i, (view, t) in enumerate(zip(self.views, self._tensors)):
            is_param = i < len(self.params)
            # Memory that others hold, such as p.data or a flat vector of weights, stays in place.
            plain = t.dtype == torch.float32 and t.is_cpu and t.is_contiguous() and not is_sharded(t) and not _is_held(t)
            direct = plain and (shared or self._group is None or self._group.leads)
            if direct and (is_param or buffers):
                t.data = view
            elif is_param or buffers:
                self._copied.append(i)
        self._with_buffers = buffers
        self._kinds = [(p.dtype, p.device) for p in self.params]
        self._spans = [_span(view) for view in self.views[: len(self.params)]]
        in_place = [i for i in range(len(self.views)) if i not in self._copied and (i < len(self.params) or buffers)]
        self._at = [(i, self._tensors[i], self.views[i].data_ptr()) for i in in_place]
        self.mark()

    def check(self, of: Optional[set[int]] = None) -> None:
        """Checks that the parameters are still in place, and that the servers can follow what is frozen and unfrozen. ``of``:
        those that step; a script may freeze the others meanwhile, as a GAN's discriminator.

        Raises:
            MisuseError: one was moved, or one was frozen or unfrozen that cannot be.
        """
        self._check_frozen(of)
        for place, key, it in self._expected_places:
            if place.get(key) is not it:
                self._record_places()
                break
        if self._with_buffers:
            self._follow_buffers()
        for i in self._copied:
            if i < len(self.params) and (self.params[i].dtype, self.params[i].device) != self._kinds[i]:
                raise MisuseError(
                    f"`{self.names[i]}` was {self._kinds[i][0]} on {self._kinds[i][1]} at run.prepare(), and is {self.params[i].dtype} on "
                    f"{self.params[i].device}: call model.to(), .half(), .float() before"
                )
        for i, t, at in self._at:
            if t.data_ptr() != at:
                raise MisuseError(
                    f"`{self.names[i]}` was given other memory after run.prepare() (model.to(), .half(), load_state_dict(assign=True)): "
                    "do that before"
                )

    def _check_frozen(self, of: Optional[set[int]]) -> None:
        later = "Or run.save(), and continue with a new run and resume="
        for name, p in self._others:
            if p.requires_grad:
                how = ", in a parameter group in which all are frozen" if self.freezes else " unfrozen"
                raise MisuseError(
                    f"`{name}` was unfrozen after run.prepare(), and the servers do not have it: give it to the optimizer before{how}. {later}"
                )
        for its in self.members:
            frozen = [i for i in its if not self.params[i].requires_grad and (of is None or i in of)]
            if not frozen or self.freezes and len(frozen) == len(its):
                continue
            name = self.names[frozen[0]]
            if not self.freezes:
                raise MisuseError(
                    f"`{name}` was frozen after run.prepare(), and the servers do not know: that takes apply=\"servers\", and no ranks of a group. {later}"
                )
            trained = self.names[next(i for i in its if i not in frozen)]
            raise MisuseError(
                f"`{name}` is frozen and `{trained}` is not, and a step leaves out a whole parameter group (of more than {_FEW_GROUPS} groups those of "
                f"equal options are one): make a group of each part before run.prepare(). {later}"
            )

    def _follow_buffers(self) -> None:
        """Statistics that the script has replaced keep their own memory from then on."""
        for i, b in enumerate(self.statistics(), len(self.params)):
            if b is not self._tensors[i]:
                self._tensors[i] = b
                self._own_memory(i)

    def follow_memory(self) -> None:
        """What the script has given other memory (``p.data = ...``) keeps it from then on: its values are a write like any other."""
        for i, t, at in list(self._at):
            if t.data_ptr() != at:
                self._own_memory(i)

    def _own_memory(self, i: int) -> None:
        if i not in self._copied:
            self._copied.append(i)
            self._at = [place for place in self._at if place[0] != i]

    # ---- a script's own writes to weights ----

    def mark(self) -> None:
        """Marks the parameters as equal to the servers'."""
        self._versions = [p._version for p in self.params]
        self._sample += 1
        self._digests = self._digest()

    def _digest(self) -> list[int]:
        """A digest of a sample of each CPU parameter's bytes; each step samples other bytes."""
        for i in self._copied:
            if i < len(self.params):
                self._spans[i] = _span(own(self.params[i]))
        return digest(self._spans, self._sample)

    def written(self) -> Optional[str]:
        """The name of a parameter whose values changed since the last :meth:`mark`.

        Torch counts writes, except those to ``.data``; a sampled digest detects these. Weights that were swapped out
        and in again count as unchanged.
        """
        now, digests = [p._version for p in self.params], self._digest()
        if now == self._versions and digests == self._digests:
            return None
        for i, p in enumerate(self.params):
            if digests[i] != self._digests[i]:
                return self.names[i]
            if now[i] == self._versions[i]:
                continue
            mine, servers = own(p.detach()), self.parts[i]
            if i in self._copied:
                if not torch.equal(mine.cpu(), servers.to(mine.dtype)):
                    return self.names[i]
            elif mine.numel() * mine.element_size() > WHOLE_BYTES:
                # The sample cannot prove equality. From now on the vector keeps a copy of the servers' values.
                p.data = mine.clone()
                self._own_memory(i)
        return None

    def spread(self) -> None:
        """Copies the vector to the tensors with their own memory."""
        if self._copied:
            if self._with_buffers:
                self._follow_buffers()
            with torch.no_grad():
                moved = [(mine, self.parts[i]) for i in self._copied if not _holds(mine := own(self._tensors[i].data), self.parts[i])]
                if moved:
                    torch._foreach_copy_([mine for mine, _ in moved], [servers for _, servers in moved], True)
            self._synchronize()

    @torch.no_grad()
    def gather(self) -> None:
        """The reverse, for workers that change their own weights. The first rank supplies values that are equal on
        all ranks of a group."""
        given = [i for i in self._copied if self._group is None or self._group.leads or is_sharded(self._tensors[i])]
        if given:
            torch._foreach_copy_([self.parts[i] for i in given], [own(self._tensors[i].data) for i in given])

    @torch.no_grad()
    def round(self) -> None:
        """Takes the digits from the parameters that the vector does not hold."""
        for i in self._copied:
            if i < len(self.params) and self.params[i].dtype is torch.float64:
                own(self.params[i].data).copy_(self.parts[i])

    def _synchronize(self) -> None:
        device = next((self._tensors[i].device for i in self._copied if self._tensors[i].is_cuda), None)
        if device is not None:
            torch.cuda.current_stream(device).synchronize()  # the next pull overwrites the vector


def _can_be_held(p: torch.Tensor) -> bool:
    """Whether the servers can hold a frozen parameter: a quantized one, for example, is never trained."""
    return p.is_floating_point() and p.layout is torch.strided and p.numel() > 0 and not repeats(p) and not hasattr(p, "__tensor_flatten__")


def _classes(optimizer: Optimizers, held: set[int]) -> list[int]:
    """The class of each parameter group. If there are many groups, for example one per tensor, those of equal options form
    one class: the trained ones, and the frozen ones."""
    holds = [any(id(p) in held for p in g["params"]) for g in optimizer.param_groups]
    trains = [any(p.requires_grad for p in g["params"]) for g in optimizer.param_groups]
    few = {kind: sum(h and t is kind for h, t in zip(holds, trains)) <= _FEW_GROUPS for kind in (True, False)}
    known: dict[Any, int] = {}
    classes = []
    its = owners(optimizer)
    for i, (g, trained) in enumerate(zip(optimizer.param_groups, trains)):
        options = (id(its[i]), g.get("initial_lr", g["lr"]), repr([(k, v) for k, v in g.items() if k != "params"]))
        classes.append(known.setdefault(i if few[trained] else (trained, *options), len(known)) if holds[i] else -1)
    if len(known) > MAX_CLASSES:
        raise ConfigError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups with {len(known)} different options, and the "
            f"servers hold at most {MAX_CLASSES}: give more parameters the same ones"
        )
    return classes


def _holds(t: torch.Tensor, servers: torch.Tensor) -> bool:
    """Whether a float64 tensor has the servers' float32 values already, and more digits than they."""
    return t.dtype is torch.float64 and torch.equal(t.to("cpu", torch.float32), servers)


def repeats(t: torch.Tensor) -> bool:
    """Whether several of its values share memory, as after ``expand()``."""
    mine = own(t)
    return any(stride == 0 and size > 1 for size, stride in zip(mine.shape, mine.stride()))


def _span(t: torch.Tensor) -> tuple[int, int]:
    """Address and number of its bytes on the CPU; 0 if they are not there, or not contiguous."""
    bytes_ = t.numel() * t.element_size()
    alone = t.is_cpu and (t.is_contiguous() or _reach(t) == bytes_)
    return (t.data_ptr(), bytes_) if alone else (0, 0)


def _reach(t: torch.Tensor) -> int:
    """Bytes from its first value to the end of its last one."""
    return (1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))) * t.element_size()


def _overlapping(tensors: list[torch.Tensor], trained: int) -> Optional[tuple[int, int]]:
    """Two tensors that share a value, at least one of them among the first ``trained``."""
    spans = sorted(
        (t.untyped_storage().data_ptr(), t.data_ptr(), t.data_ptr() + _reach(t), i) for i, t in enumerate(tensors) if t.data_ptr()
    )
    for at, (storage, _, end, i) in enumerate(spans):
        for other, begin, _, j in spans[at + 1 :]:
            if other != storage or begin >= end:
                break
            if min(i, j) < trained and _common(tensors[i], tensors[j]):
                return min(i, j), max(i, j)
    return None


def _common(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors with interleaved bytes share a byte: columns of one matrix do not."""
    first = min(a.data_ptr(), b.data_ptr())

    def places(t: torch.Tensor) -> torch.Tensor:
        size, begin = t.element_size(), t.data_ptr() - first
        every = torch.arange(_reach(t) // size, dtype=torch.int64, device="cpu").as_strided(t.shape, t.stride()).reshape(-1)
        return (every * size + begin).unsqueeze(1) + torch.arange(size, dtype=torch.int64, device="cpu")

    return bool(torch.isin(places(a), places(b)).any())


def _uses(t: torch.Tensor) -> int:
    """How many tensors use its memory. (Torch's own count; 1 for a release without it.)"""
    count: Any = getattr(torch._C, "_storage_Use_Count", None)
    return int(count(t.untyped_storage()._cdata)) if count is not None else 0


def _is_held(t: torch.Tensor) -> bool:
    """Whether its memory has other users: another tensor, another process (``share_memory()``), or NumPy."""
    alone = torch.nn.Parameter(torch.empty(1, dtype=torch.float32, device="cpu"))
    shared: Any = t  # untyped in torch
    return bool(shared.is_shared()) or not t.untyped_storage().resizable() or _uses(t) > _uses(alone)


def is_sharded(t: torch.Tensor) -> bool:
    """Whether this is a rank's shard of a tensor, as with FSDP2."""
    # Torch imports it only for sharding, and slowly. Until 2.4 its place is `_tensor`, and `tensor` has other things.
    for place in ("torch.distributed.tensor", "torch.distributed._tensor"):
        kind = getattr(sys.modules.get(place), "DTensor", None)
        if kind is not None:
            return isinstance(t, kind)
    return False


def own(t: Any) -> torch.Tensor:
    """This rank's values of it."""
    mine: torch.Tensor = t.to_local() if is_sharded(t) else t
    return mine


def part(whole: torch.Tensor, t: Any) -> torch.Tensor:
    """This rank's part of another, whole tensor of its shape."""
    if not is_sharded(t):
        return whole
    (chunk,) = t.__create_chunk_list__()
    return whole[tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes))]


def apart(values: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """The parts of a vector as independent tensors: pickling or saving one writes only its own values, where an
    ordinary view would write the whole vector."""
    kind: Any = type("Values", (ctypes.c_float * values.numel(),), {})
    memory = kind.from_address(values.data_ptr())
    memory.values = values  # kept alive by any part
    parts, at = [], 0
    for shape in shapes:
        part = torch.frombuffer(memory, dtype=torch.float32, count=shape.numel(), offset=at)
        parts.append(part.view(shape))
        at += 4 * shape.numel()
    return parts


def staged(gradient: torch.Tensor, stage: Optional[torch.Tensor]) -> torch.Tensor:
    """A gradient in the servers' form: contiguous float32 on the CPU. ``stage``: memory for it, reused from step to
    step."""
    if stage is None:
        stage = torch.empty(gradient.shape, dtype=torch.float32, device="cpu", pin_memory=gradient.is_cuda)
    return stage.copy_(gradient.detach())  # with create_graph=True it is part of a graph, which the stage would keep
