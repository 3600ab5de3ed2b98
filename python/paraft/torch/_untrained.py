"""What a model has and the servers do not: frozen parameters outside of frozen parameter groups, and buffers that are no running
statistics. It must be the same on all workers, as their results are of one model: they compare digests when they join, and send
nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any, Optional

import torch

from .._paraft import digest
from .._run import Run
from ..errors import ConfigError
from ._flat import Flat, own
from ._names import Names

#: Bytes of which ``digest`` leaves none out.
_SLICE = 32 << 10
#: Of so many places in the order of the tensors a worker says what is before: a refusal has room for that.
_PLACES = 20
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
_SAID = re.compile(r"there `python untrained (\d+) ([\w-]+)[^`,]*`, here `python untrained (\d+) ([\w-]+)[^`,]*`")


def join(run: Run, model: torch.nn.Module, flat: Flat, *args: Any, code: str = "", **options: Any) -> Any:
    """Joins the job (``Run._join``). ``code``: what else must be the same on all workers.

    Raises:
        ConfigError: what the servers do not hold differs from the other workers'.
    """
    tensors = list(_untrained(model, flat)) if run.workers > 1 else []
    said = f"untrained {len(tensors)} {_described(tensors)}" if tensors else ""
    try:
        return run._join(*args, data=" ".join(filter(None, ("python", said, code))), **options)
    except ConfigError as e:
        why = _explained(str(e), [name for name, _ in tensors])
        if why is None:
            raise
        raise ConfigError(why) from None


def _untrained(model: torch.nn.Module, flat: Flat) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors, in the model's order. Counters of batches are not compared: a worker that comes back may have others."""
    names = Names(model)
    held = {id(t) for t in (*flat.params, *flat.buffers)}
    for key, t in (*model.named_parameters(), *model.named_buffers()):
        if id(t) not in held and t.numel() and key.rpartition(".")[2] != "num_batches_tracked":
            yield names.of(t), t


def _described(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """A digest of all, behind shorter ones of what is before each of some places."""
    whole, n = hashlib.sha256(), len(tensors)
    said = ""
    ends = _ends(n)
    for i, (name, t) in enumerate(tensors):
        whole.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
        for part in _content(t):
            whole.update(part.to_bytes(8, "little"))
        if i + 1 in ends:
            said += _digits(whole.digest(), 2)
    return said + _digits(whole.digest(), 11)


def _ends(n: int) -> list[int]:
    places = min(n, _PLACES)
    return [(i + 1) * n // places for i in range(places)]


def _digits(of: bytes, count: int) -> str:
    number = int.from_bytes(of[:16], "big")
    return "".join(_DIGITS[number >> 6 * i & 63] for i in range(count))


@torch.no_grad()
def _content(t: Any) -> Iterator[int]:
    """Digests of all its bytes, piece by piece."""
    t = own(t.detach())
    if hasattr(t, "__tensor_flatten__"):  # such as a quantized one
        for name in t.__tensor_flatten__()[0]:
            yield from _content(getattr(t, name))
        return
    if t.layout is torch.sparse_coo:
        t = t.coalesce()
        yield from _content(t.indices())
        yield from _content(t.values())
        return
    if t.layout is not torch.strided:
        t = t.to_dense()
    t = t.cpu().resolve_conj().resolve_neg().contiguous()
    at, count = t.data_ptr(), t.numel() * t.element_size()
    for begin in range(0, count, _SLICE):
        yield digest([(at + begin, min(_SLICE, count - begin))], 0)[0]


def _explained(refusal: str, names: list[str]) -> Optional[str]:
    """Names the tensor that differs, if the servers have refused this worker for one."""
    found = _SAID.search(refusal)
    if found is None or found.group(1, 2) == found.group(3, 4):
        return None
    count, there, _, here = found.groups()
    if int(count) != len(names):
        which = f"the model has {len(names)} of them here, and {count} on the other workers"
    else:
        ends = _ends(len(names))
        differ = (i for i in range(len(ends)) if there[2 * i : 2 * i + 2] != here[2 * i : 2 * i + 2])
        place = next(differ, len(ends) - 1)
        first, last = ([0, *ends][place], ends[place] - 1)
        which = f"`{names[first]}` differs" if first == last else f"one of `{names[first]}` to `{names[last]}` differs (of {last - first + 1})"
    return (
        "frozen parameters, and buffers that are no running statistics, are not the servers', and must be the same on all workers; "
        f"{which}. Load them before run.prepare(), or seed all workers alike; keep what is each worker's own out of the model"
    )
