"""vLLM's side of ``paraft feed vllm``: a backend for weight transfer that loads a job's versions into a server::

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --weight-transfer-config '{"backend": "paraft"}'

vLLM finds it by this package's entry point of the group ``vllm.general_plugins``; nothing of it is called by hand.

::

    /init_weight_transfer_engine   job, type of the values
    /start_weight_update           nothing is changed yet
    /update_weights                version, file ──▶ check ──▶ load        all of a version in one call
    /finish_weight_update          an error, unless a version is loaded

The file must be whole, of the version, job and type that were named, and have the names and shapes of the weights with which the server
started: then vLLM loads now all that it loaded then. What differs is an error, and no weight is changed. vLLM itself says nothing of a
layer of which an update has some tensors alone, as k and v without q, and fills it up with what lies in memory.

An error while tensors are loaded leaves weights of both versions: the server must not answer before a version is loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from .errors import ConfigError, DataError, MisuseError

__all__ = ["ParaftWeightTransferEngine", "register"]

BACKEND = "paraft"
#: Names that a message lists at most.
_LISTED = 10
#: The output layer has the embedding's values where the two are tied; a version has them once.
_TIED = "lm_head.weight"

Shapes = dict[str, list[int]]

try:
    #: Untyped, so that type checking this module does not need the package.
    _base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
    _factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
except ModuleNotFoundError as e:
    if not f"{e.name}.".startswith("vllm."):
        raise
    why = "" if e.name == "vllm" else f" 0.32 or newer; the one that is here has no {e.name}"
    raise ImportError(f"paraft.vllm is for processes of vLLM: install vllm{why}") from e


def register() -> None:
    """Makes the backend known. vLLM calls it in each of its processes, in some of them twice."""
    # Its second registration raises, and a third package that takes this name is not to be expected.
    with contextlib.suppress(ValueError):
        _factory.WeightTransferEngineFactory.register_engine(BACKEND, __name__, "ParaftWeightTransferEngine")


@dataclass
class InitInfo(_base.WeightTransferInitInfo):  # type: ignore[misc]
    """What the feed says once."""

    job: str
    dtype: str
    servers: Optional[list[str]] = None


@dataclass
class UpdateInfo(_base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version is to be loaded, and its safetensors file on this host."""

    version: str
    file: str

    def __post_init__(self) -> None:
        for name, value in (("version", self.version), ("file", self.file)):
            if not isinstance(value, str) or not value:
                raise ConfigError(f"update_info: `{name}` is {value!r}: give a text")


class ParaftWeightTransferEngine(_base.WeightTransferEngine):  # type: ignore[misc]
    """Loads versions into the model of one worker of vLLM."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    # A job's versions are of one model.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._init: Optional[InitInfo] = None
        self._is_open = False
        self._loaded: Optional[str] = None
        self._expected: Shapes = {}
        self._why_not: Optional[str] = None
        # Now, as a feed may remove the folder of a version with which the server started.
        try:
            self._expected = shapes_at_start(vllm_config)
        except (ConfigError, DataError) as e:
            self._why_not = str(e)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if self._why_not is not None:
            raise ConfigError(self._why_not)
        # A feed that was started again says it again.
        self._init = init_info

    def start_weight_update(self) -> None:
        if self._init is None:
            raise MisuseError("an update was started before /init_weight_transfer_engine: let `paraft feed vllm` drive this server")
        if self._is_open:
            raise MisuseError("an update was started amid another: finish that one with /finish_weight_update")
        self._is_open, self._loaded = True, None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for an accelerator, which a server on the CPU does not have.
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                importlib.import_module("torch").accelerator.synchronize()
        except BaseException:
            # vLLM ends an update whose chunk fails: the next one begins with a start.
            self._is_open, self._loaded = False, None
            raise

    def receive_weights(self, update_info: UpdateInfo) -> None:
        version, path = update_info.version, Path(update_info.file)
        if self._init is None or not self._is_open:
            raise MisuseError(f"version {version} was sent outside of an update: call /start_weight_update first")
        if self._loaded is not None:
            raise MisuseError(f"version {version} was sent after version {self._loaded} in one update: an update loads one version")
        with _opened(path, f"version {version}: nothing was loaded: ") as file:
            self._check(file, path, version, self._init)
            self._load(file, path, version)
        self._loaded = version

    def _check(self, file: Any, path: Path, version: str, init: InitInfo) -> None:
        notes = file.metadata() or {}
        for key, wanted in (("version", version), ("job", init.job), ("dtype", init.dtype)):
            if notes.get(key) != wanted:
                found = f"is of {key} `{notes[key]}`" if key in notes else f"says no {key}"
                raise DataError(
                    f"version {version}: the file {found}, not of {key} `{wanted}`; nothing was loaded: give the file that "
                    f"`paraft feed` wrote for this version, not {path}"
                )
        wrong = differences(_shapes(file), self._expected, may_lack=[_TIED] if _is_tied(self.vllm_config) else [])
        if wrong:
            some = "; ".join(wrong[:_LISTED])
            raise DataError(
                f"version {version}: {len(wrong)} tensors differ from the weights with which vLLM started; nothing was loaded: {some}. "
                f"Start vLLM from the model that the job trains; frozen parameters are not in a version. The file: {path}"
            )

    def _load(self, file: Any, path: Path, version: str) -> None:
        reload = importlib.import_module("vllm.model_executor.model_loader.reload")
        reload.initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(_tensors(file))
            reload.finalize_layerwise_reload(self.model, self.model_config)
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
            try:
                self._drop(reload)
            except Exception as also:
                why += f"; then {type(also).__name__}: {also}: start the server again"
            raise DataError(
                f"version {version} is half loaded, keep the server paused until a version is loaded: {why} (file {path})"
            ) from e

    def _drop(self, reload: Any) -> None:
        """Drops what vLLM has buffered of a failed version. Else it keeps it, and the next version fails of it, too."""
        info = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise").get_layerwise_info
        for layer in self.model.modules():
            info(layer).loaded_weights.clear()
            # Layers that have loaded nothing get their former tensors back.
            info(layer).load_numel = 0
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        if not self._is_open or self._loaded is None:
            raise MisuseError("an update was finished before a version was loaded: call /update_weights first")
        self._is_open = False

    def shutdown(self) -> None:
        self._init, self._is_open, self._loaded = None, False, None

    def trainer_send_weights(self, *_: Any, **__: Any) -> None:
        """The servers send nothing to vLLM: the feed writes files."""
        raise MisuseError("`paraft feed vllm` brings the weights: nothing is sent from a trainer")

    # Abstract in some releases of vLLM.
    trainer_init = trainer_send_weights


def shapes_at_start(vllm_config: Any) -> Shapes:
    """Names and shapes of the weights with which this server started.

    Raises:
        ConfigError: they are in no safetensors files on this host.
        DataError: such a file is damaged.
    """
    model = vllm_config.model_config.model
    folder = Path(model)
    if not folder.is_dir():
        hub = importlib.import_module("huggingface_hub")
        cache = getattr(vllm_config.load_config, "download_dir", None)
        try:
            revision = vllm_config.model_config.revision
            folder = Path(hub.snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
        except Exception as e:
            raise ConfigError(_no_files(model)) from e
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
    except (OSError, ValueError, KeyError, AttributeError) as e:
        raise DataError(f"{index}: {type(e).__name__}: {e}: it is no index of safetensors files") from e
    # Mistral's folders have all weights a second time, in `consolidated.safetensors`.
    every = [path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")]
    files = [folder / name for name in names] if names is not None else every
    if not files:
        raise ConfigError(_no_files(model))
    shapes: Shapes = {}
    for path in sorted(files):
        with _opened(path) as file:
            shapes.update(_shapes(file))
    return shapes


def differences(found: Shapes, expected: Shapes, may_lack: Sequence[str] = ()) -> list[str]:
    """What is wrong with the tensors of a version, one line a tensor, in the order of their names."""
    wrong = []
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            wrong += [] if name in may_lack else [f"`{name}` is missing"]
        elif name not in expected:
            wrong.append(f"`{name}` is not in the model")
        elif found[name] != expected[name]:
            wrong.append(f"`{name}` is {found[name]}, the model's is {expected[name]}")
    return wrong


def _no_files(model: str) -> str:
    return f"the weights with which vLLM started are in no safetensors files on this host: start it from a folder that has them, not from {model!r}"


@contextlib.contextmanager
def _opened(path: Path, what: str = "") -> Iterator[Any]:
    """A whole safetensors file. ``what`` begins a message: vLLM leaves paths out of its answers, and only logs them."""
    safetensors = importlib.import_module("safetensors")
    try:
        # It compares the header with the file's length.
        opened = safetensors.safe_open(str(path), framework="pt")
    except OSError as e:
        raise DataError(f"{what}{e}: {path}: this host must see the feed's folder --to under the same path") from e
    except safetensors.SafetensorError as e:
        raise DataError(f"{what}{e}: {path}: it is no whole safetensors file; let `paraft feed` write the version again") from e
    with opened as file:
        yield file


def _shapes(file: Any) -> Shapes:
    return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}


def _tensors(file: Any) -> Iterator[tuple[str, Any]]:
    """In the file's order, which is layer by layer: vLLM buffers each layer until it is whole."""
    for name in file.offset_keys():
        yield name, file.get_tensor(name)


def _is_tied(vllm_config: Any) -> bool:
    text = getattr(vllm_config.model_config, "hf_text_config", None)
    return bool(getattr(text, "tie_word_embeddings", False))
