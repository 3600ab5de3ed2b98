"""A job's checkpoints as torch objects, for scripts without Paraft. Nothing here needs servers."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import logging
import struct
import warnings
import zlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Optional, Union

import torch

from .._run import Run
from ..errors import DataError
from . import _optim
from ._flat import MEAN, STATE, Flat, own, part
from ._names import Names, as_in
from ._together import Models, Optimizers, Together, one_module

_LOG = logging.getLogger("paraft")

#: The latest readable format of ``checkpoint.json`` (docs/checkpoints.md).
_FORMAT = 1
_DTYPES = {"F32": torch.float32, "I64": torch.int64}
_Path = Union[str, "PathLike[str]"]


def load_checkpoint(checkpoint: _Path, model: Optional[Models] = None) -> dict[str, Any]:
    """Loads a checkpoint, from which a script without Paraft can resume::

        saved = paraft.torch.load_checkpoint("checkpoints")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    ``model`` has the trained parameters and the running statistics, by the model's own names, without those of
    wrappers (``_orig_mod.``, ``module.``), and under all names of a tensor. A checkpoint has neither frozen
    parameters (except those of frozen parameter groups) nor each worker's own values (integer buffers). With ``model=`` it is complete for
    ``model.load_state_dict()``: by that model's names, including wrappers', and with that model's present values for
    everything missing in the checkpoint. ``optimizer`` is what ``optimizer.state_dict()`` would be, had torch made
    the steps itself; a list if the run had several,
    ``None`` if the workers ran their own. ``step`` is the number of finished steps.

    Args:
        checkpoint: a checkpoint, a folder of them, or a run's folder: of several the latest.
        model: the model that will load the values.

    Raises:
        DataError: there is none, or it is truncated or damaged.
    """
    found = opened(checkpoint)
    state = found.model() if model is None else as_in(one_module(model), found.model())
    return {"model": state, "optimizer": found.optimizer(), "step": found.step}


def export_dcp(checkpoint: _Path, to: _Path) -> None:
    """Writes a checkpoint in the format of ``torch.distributed.checkpoint``, for ``dcp.load`` with any number of
    ranks. Its state is ``model`` and ``optimizer``, by the names of
    ``torch.distributed.checkpoint.state_dict.get_state_dict``, and ``step``, a tensor.

    Args:
        checkpoint: see :func:`load_checkpoint`.
        to: a folder, which is created.

    Raises:
        DataError: see :func:`load_checkpoint`.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint import state_dict_saver as saver

    found = opened(checkpoint)
    state: dict[str, Any] = {"model": found.model(), "step": torch.tensor(found.step)}
    optimizer = found.optimizer()
    if optimizer is not None:
        names = [name for group in found.groups() for name in group["params"]]
        groups = found.groups()
        state["optimizer"] = {"state": {n: s for n in names if (s := found.state_of(n))}, "param_groups": groups}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # a group is not needed
        if "no_dist" in inspect.signature(saver.save).parameters:
            saver.save(state, checkpoint_id=to, no_dist=True)
        else:
            # In an older torch save() waits for the other ranks where there is a process group, and only what it is made of can do without.
            warnings.filterwarnings("ignore", category=FutureWarning)
            saver.save_state_dict(state, FileSystemWriter(to), no_dist=True)


class Checkpoint:
    """A checkpoint, read completely.

    Raises:
        DataError: it is incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = self._read()
        self._model = self._tensors("model.safetensors")
        self._slots = self._tensors("optimizer.safetensors")
        self._updates = self._count_updates()
        said = json.loads(self._manifest.get("note") or "{}")
        #: The values of :func:`note`; empty in the checkpoint of a worker of another kind.
        self._said: dict[str, Any] = said.get("torch", {}) if isinstance(said, dict) else {}

    @property
    def step(self) -> int:
        """The number of finished steps, of the slowest worker if they run at their own pace."""
        return int(self._manifest["resume_step"])

    def model(self) -> dict[str, torch.Tensor]:
        """``state_dict()`` of the model, without what the servers did not have."""
        # Where the workers ran the optimizer on the mean gradient, the rest of it is Paraft's own.
        tensors = {name: t for name, t in self._model.items() if not name.startswith(MEAN) and name != STATE}
        for alias, name in self._said.get("tied", {}).items():
            if name in tensors:
                tensors[alias] = tensors[name]
            counter = name.removesuffix("running_mean") + "num_batches_tracked"  # which the servers add
            if name.endswith("running_mean") and counter in tensors:
                tensors[alias.removesuffix("running_mean") + "num_batches_tracked"] = tensors[counter]
        return tensors

    @property
    def frozen(self) -> list[str]:
        """The model's parameters that the servers did not have: frozen ones."""
        return list(self._said.get("frozen", []))

    @property
    def kind(self) -> str:
        """The kind of the servers' optimizer."""
        return str(self._manifest["optimizer"]["kind"])

    def trained(self) -> dict[str, list[int]]:
        """Shapes of trained tensors, by name, in the order of the checkpoint."""
        return {t["name"]: list(t["shape"]) for t in self._trained()}

    def optimizer(self) -> Union[dict[str, Any], list[dict[str, Any]], None]:
        """``state_dict()`` of the optimizer, by torch's indices, or a list of those of several; None if it was not the
        servers'."""
        if "local" in self._said:
            return None
        groups, counts = self.groups(), self._said.get("optimizers")
        if counts is None:
            return self._state_dict(groups)
        of = iter(groups)
        return [self._state_dict(list(itertools.islice(of, n))) for n in counts]

    def _state_dict(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        names = [name for group in groups for name in group["params"]]
        state = {i: self.state_of(name) for i, name in enumerate(names)}
        at = 0
        for group in groups:
            group["params"] = list(range(at, at + len(group["params"])))
            at += len(group["params"])
        return {"state": {i: s for i, s in state.items() if s}, "param_groups": groups}

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the names of their parameters and the checkpoint's rates."""
        trained = {t["name"] for t in self._trained()}
        groups = [dict(g) for g in self._said.get("groups", [])] or self._own_groups()
        rates = self._manifest.get("rates", [])
        of = iter(range(len(groups)))
        classes = self._said.get("classes") or [next(of) if any(n in trained for n in g["params"]) else -1 for g in groups]
        for group, c in zip(groups, classes):
            if 0 <= c < len(rates):
                group["lr"] = rates[c]
            if "betas" in group:
                group["betas"] = tuple(group["betas"])
        return groups

    def state_of(self, name: str) -> dict[str, torch.Tensor]:
        """A parameter's state in torch's optimizer: empty if the optimizer has made no step with it."""
        if name not in self._updates:
            return {}
        table = self._tables[name]
        # A group with an optimizer of its own has its vectors in the places of the job's.
        slots = {own: self._slots[f"{slot}.{name}"] for own, slot in zip(_optim.slots(table), self._manifest["slots"])}
        return _optim.state_of(table, slots, self._updates[name])

    @functools.cached_property
    def _tables(self) -> dict[str, dict[str, Any]]:
        """The optimizer's table of each trained parameter."""
        table = self._manifest["optimizer"]
        of, tables = iter(self._trained()), {}
        for cut in self._manifest.get("groups") or [{"values": _len(self._trained())}]:
            left = cut["values"]
            while left > 0:
                tensor = next(of)
                tables[tensor["name"]] = cut.get("optimizer") or table
                left -= _len([tensor])
        return tables

    # ---- the content of the files ----

    def _trained(self) -> list[dict[str, Any]]:
        return [t for t in self._manifest["tensors"] if t["kind"] == "param"]

    def _own_groups(self) -> list[dict[str, Any]]:
        """For a checkpoint without torch's groups: groups in the order of the tensors, with torch's defaults."""
        table = self._manifest["optimizer"]
        of = iter(self._trained())
        groups = []
        for cut in self._manifest.get("groups") or [{"values": _len(self._trained()), **table}]:
            group = _optim.group({**(cut.get("optimizer") or table), "lr": cut["lr"], "weight_decay": cut["weight_decay"]})
            group["params"], left = [], cut["values"]
            while left > 0:
                tensor = next(of)
                group["params"].append(tensor["name"])
                left -= _len([tensor])
            groups.append(group)
        return groups

    def _count_updates(self) -> dict[str, int]:
        """Each parameter's number of updates: the maximum of its buckets', which differ if workers run at their own
        pace."""
        bucket, versions = self._manifest["bucket_len"], [b["version"] for b in self._manifest["buckets"]]
        cuts: list[tuple[int, int]] = []
        at = 0
        for end, row in self._parts():
            # Buckets do not split rows with a norm constraint.
            length = max(bucket // row * row, row)
            cuts += [(begin, min(begin + length, end)) for begin in range(at, end, length)]
            at = end
        updates, begin = {}, 0
        for tensor in self._trained():
            end = begin + _len([tensor])
            updates[tensor["name"]] = max(v for (a, b), v in zip(cuts, versions) if a < end and b > begin)
            begin = end
        return updates

    def _parts(self) -> list[tuple[int, int]]:
        """The parts of the trained values, as in ``docs/protocol.md``: the end of each part, and the number of values
        that no bucket splits."""
        trained = _len(self._trained())
        ends = {trained}
        for lengths in ([g["values"] for g in self._manifest.get("groups", [])], self._manifest.get("stages", [])):
            ends.update(itertools.accumulate(lengths))
        rows = []
        for c in self._manifest.get("constraints", []):
            row = max((rule.get("row", 1) for rule in c["rule"].values()), default=1)
            if row > 1:
                rows.append((c["offset"], c["offset"] + c["values"], row))
                ends.update(rows[-1][:2])
        return [(end, next((row for begin, last, row in rows if begin < end <= last), 1)) for end in sorted(ends - {0})]

    def _broken(self, piece: str, why: str) -> DataError:
        return DataError(f"the checkpoint {self.path} is not whole: {piece} {why}")

    def _read(self) -> dict[str, Any]:
        piece = "checkpoint.json"
        try:
            text = (self.path / piece).read_bytes()
        except FileNotFoundError:
            raise self._broken(piece, "is missing") from None
        except OSError as e:
            raise DataError(f"{self.path / piece}: {e.strerror}") from None
        try:
            manifest = json.loads(text)
            form = int(manifest["format"])
        except (ValueError, KeyError, TypeError):
            raise self._broken(piece, "is cut off or damaged") from None
        if form > _FORMAT:
            raise DataError(f"the checkpoint {self.path} is of format {form}, this paraft reads up to {_FORMAT}: use a newer paraft")
        before, mark, rest = text.rpartition(b'"seal": "')
        if not mark or rest[:8] != b"%08x" % zlib.crc32(before + mark + b"0" * 8 + rest[8:]):
            raise self._broken(piece, "is damaged or was changed: its CRC-32 is not the one in its `seal`")
        found: dict[str, Any] = manifest
        return found

    def _tensors(self, piece: str) -> dict[str, torch.Tensor]:
        """The tensors of a safetensors file, each with its own memory, after verification of every byte."""
        stamp = self._manifest["files"].get(piece)
        if stamp is None:
            raise self._broken("checkpoint.json", f"does not name {piece}")
        try:
            length = (self.path / piece).stat().st_size
            if length != stamp["bytes"]:
                how = "is cut off" if length < stamp["bytes"] else "is too long"
                raise self._broken(piece, f"{how}: {length} of {stamp['bytes']} bytes")
            with open(self.path / piece, "rb") as file:
                head = file.read(8)
                header = file.read(min(struct.unpack("<Q", head)[0], length))
                crc = zlib.crc32(header, zlib.crc32(head))
                tensors = {}
                for name, dtype, shape, count in self._places(piece, header, length):
                    values = bytearray(count)
                    file.readinto(values)
                    crc = zlib.crc32(values, crc)
                    tensors[name] = torch.frombuffer(values, dtype=dtype).view(shape)
        except FileNotFoundError:
            raise self._broken(piece, "is missing") from None
        except OSError as e:
            raise DataError(f"{self.path / piece}: {e.strerror}") from None
        if f"{crc:08x}" != stamp["crc32"]:
            raise self._broken(piece, f"is damaged: its CRC-32 is {crc:08x} instead of {stamp['crc32']}")
        return tensors

    def _places(self, piece: str, header: bytes, length: int) -> Iterator[tuple[str, torch.dtype, list[int], int]]:
        """A file's entries in order: names, types, shapes, and their length in bytes."""
        try:
            infos = {name: info for name, info in json.loads(header).items() if name != "__metadata__"}
            at = 0
            for name, info in sorted(infos.items(), key=lambda of: of[1]["data_offsets"]):
                begin, end = info["data_offsets"]
                if begin != at or end < begin or 8 + len(header) + end > length:
                    raise ValueError(name)
                at = end
                yield name, _DTYPES[info["dtype"]], info["shape"], end - begin
        except (ValueError, KeyError, TypeError):
            raise self._broken(piece, "is damaged: its header can't be read") from None


def note(optimizer: Optional[Optimizers], model: torch.nn.Module, flat: Flat) -> str:
    """A script's note in checkpoints, with which :func:`load_checkpoint` restores torch's objects. ``optimizer``:
    None if it is the worker's own."""
    names = Names(model)
    said: dict[str, Any] = {"tied": flat.aliases, "frozen": flat.frozen}
    if optimizer is None:
        said["local"] = True
    else:
        said["classes"] = flat.classes
        if isinstance(optimizer, Together):
            said["optimizers"] = [len(one.param_groups) for one in optimizer.all]
        said["groups"] = [{**_optim.plain(group), "params": [names.of(p) for p in group["params"]]} for group in optimizer.param_groups]
    return json.dumps({"torch": said})


def resumes_elsewhere(run: Run, model: torch.nn.Module, flat: Flat, optimizer: Optional[Optimizers]) -> None:
    """A checkpoint of this model with other layers frozen cannot resume in the servers' job, so a new job starts from
    it: this loads its values into model and optimizer. It leaves any other checkpoint to the servers' job.

    ``optimizer``: None if it is the worker's own."""
    if run._resume is None:
        return
    try:
        found = opened(run._resume)
    except DataError:
        return  # the job reports the error
    before, now = found.trained(), dict(zip(flat.names, ([*p.shape] for p in flat.params)))
    begun, ended = [n for n in now if n not in before], [n for n in before if n not in now]
    if not begun and not ended or any(n not in found.frozen for n in begun) or any(n not in flat.frozen for n in ended):
        return
    if any(before[n] != now[n] for n in now if n in before):
        return
    if isinstance(optimizer, Together) or optimizer is not None and found.kind != _optim.table(optimizer)["kind"]:
        return
    values, names = found.model(), Names(model)
    with torch.no_grad():
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            value = values.get(names.plain(name))
            if value is not None and list(value.shape) == list(t.shape):
                own(t.data).copy_(part(value, t))
        for name, into in zip(flat.names, flat.views):
            if name in values:
                into.copy_(values[name])
        if optimizer is not None:
            for name, p in zip(flat.names, flat.params):
                if name in before:
                    optimizer.state[p] = dict(found.state_of(name))
    run._resume = None
    _LOG.warning(
        "%s: other layers were frozen there (`%s`), so that a new job begins, with its weights and the optimizer's state. run.step counts from 0; "
        "%d steps were made before", found.path, (begun or ended)[0], found.step,
    )


def _len(tensors: list[dict[str, Any]]) -> int:
    return sum(torch.Size(t["shape"]).numel() for t in tensors)


def opened(path: _Path) -> Checkpoint:
    """The checkpoint at a path, or the newest complete one of a folder of them or of a run's.

    Raises:
        DataError: there is none.
    """
    path = Path(path)
    if path.name.startswith("step-") or (path / "checkpoint.json").exists():
        return Checkpoint(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    failed: Optional[DataError] = None
    for candidate in sorted((p for p in folder.glob("step-*") if p.is_dir()), reverse=True, key=_written):
        try:
            return Checkpoint(candidate)
        except DataError as why:
            _LOG.warning("%s; an earlier one is looked for", why)
            failed = failed or why
    raise failed or DataError(f"{path}: there is no checkpoint in it" if path.is_dir() else f"{path}: there is no such checkpoint")


def _written(path: Path) -> tuple[float, str]:
    """A checkpoint's time of writing. One without a time comes first, so that its error is reported first."""
    try:
        return float(json.loads((path / "checkpoint.json").read_bytes())["written"]), path.name
    except (OSError, ValueError, KeyError, TypeError):
        return float("inf"), path.name
