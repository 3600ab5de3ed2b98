"""paraft.vllm against a stub of vLLM's interface for weight transfer, 0.32: what is loaded, and what is refused."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import IN_TREE, PACKAGE, import_path

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from paraft.errors import ConfigError, DataError, MisuseError  # noqa: E402

SHAPES = {"model.embed.weight": (6, 4), "model.layers.0.weight": (4, 4), "model.layers.1.weight": (4, 4), "lm_head.weight": (6, 4)}
INIT = {"job": "llama", "dtype": "f32", "servers": ["host:7070"]}


class Factory:
    registry = {}

    @classmethod
    def register_engine(cls, name, module, class_name=None):
        if name in cls.registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls.registry[name] = (module, class_name)


class Base:
    """As far as vLLM's base class decides something."""

    def __init__(self, config, vllm_config, device, model):
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.model_config = vllm_config.model_config

    def parse_init_info(self, given):
        return self._parse(self.init_info_cls, given)

    def parse_update_info(self, given):
        return self._parse(self.update_info_cls, given)

    def _parse(self, cls, given):
        try:
            return cls(**given)
        except TypeError as e:
            raise ValueError(f"Invalid info for {type(self).__name__}: {e}") from e


@dataclass
class Info:
    pass


class Worker:
    """vLLM's worker: which calls it passes on, and when an update is over."""

    def __init__(self, engine):
        self.engine, self.active = engine, False

    def init(self, info=None):
        self.engine.init_transfer_engine(self.engine.parse_init_info(INIT if info is None else info))

    def start(self):
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.engine.start_weight_update()
        self.active = True

    def update(self, **info):
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.engine.update_weights(info)
        except BaseException:
            self.active = False
            raise

    def finish(self):
        self.engine.finish_weight_update()
        self.active = False


class Model:
    """Notes what it is given, and in which order; vLLM buffers it for its one layer."""

    def __init__(self):
        self.calls, self.weights, self.fails_at = [], {}, None
        self.info = types.SimpleNamespace(loaded_weights=[], load_numel=0)

    def modules(self):
        return [self]

    def load_weights(self, pairs):
        for name, tensor in pairs:
            if name == self.fails_at:
                raise RuntimeError("shape mismatch")
            self.calls.append(name)
            self.weights[name] = tensor
            self.info.loaded_weights.append(name)
            self.info.load_numel += tensor.numel()

    def finalize(self):
        """vLLM's own fails again of what it has buffered."""
        self.calls.append("finalize")
        if self.fails_at in SHAPES and self.info.load_numel:
            raise RuntimeError("shape mismatch")


@pytest.fixture
def vllm(monkeypatch):
    """The module, imported beside a stub of vLLM."""
    reload = types.SimpleNamespace(
        initialize_layerwise_reload=lambda model: model.calls.append("initialize"),
        finalize_layerwise_reload=lambda model, config: model.finalize(),
    )
    base = types.SimpleNamespace(WeightTransferEngine=Base, WeightTransferInitInfo=Info, WeightTransferUpdateInfo=Info)
    stubs = {
        "vllm": types.ModuleType("vllm"),
        "vllm.distributed.weight_transfer.base": base,
        "vllm.distributed.weight_transfer.factory": types.SimpleNamespace(WeightTransferEngineFactory=Factory),
        "vllm.model_executor.model_loader.reload": reload,
        "vllm.model_executor.model_loader.reload.layerwise": types.SimpleNamespace(get_layerwise_info=lambda layer: layer.info),
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    Factory.registry = {}
    monkeypatch.delitem(sys.modules, "paraft.vllm", raising=False)
    import paraft.vllm

    yield paraft.vllm
    sys.modules.pop("paraft.vllm", None)


def write(path, version="7", shapes=SHAPES, drop=(), **notes):
    tensors = {n: torch.full(s, float(i)) for i, (n, s) in enumerate(shapes.items()) if n not in drop}
    path.parent.mkdir(exist_ok=True)
    safetensors_torch.save_file(tensors, path, {"version": version, "job": "llama", "dtype": "f32", **notes})
    return str(path)


def worker_of(vllm, folder, tied=False):
    """A worker whose server started from this folder."""
    text = types.SimpleNamespace(tie_word_embeddings=tied)
    model = types.SimpleNamespace(model=str(folder), revision=None, hf_text_config=text)
    config = types.SimpleNamespace(model_config=model, load_config=types.SimpleNamespace(download_dir=None), parallel_config=None)
    return Worker(vllm.ParaftWeightTransferEngine(None, config, torch.device("cpu"), Model()))


@pytest.fixture
def worker(vllm, tmp_path):
    write(tmp_path / "base" / "model.safetensors")
    made = worker_of(vllm, tmp_path / "base")
    made.init()
    return made


def test_version_is_loaded_whole_and_in_the_files_order(worker, tmp_path):
    for version in ("7", "8"):
        file = write(tmp_path / version / "model.safetensors", version)
        model = worker.engine.model = Model()
        worker.start()
        assert model.calls == [], "nothing is changed before the file is checked"
        worker.update(version=version, file=file)
        worker.finish()
        assert model.calls[0] == "initialize" and model.calls[-1] == "finalize"
        assert sorted(model.calls[1:-1]) == sorted(SHAPES)
        expected = safetensors_torch.load_file(file)
        assert all(torch.equal(model.weights[name], t) for name, t in expected.items())
        # A feed that was started again says what it said before.
        worker.init()


def test_what_does_not_fit_is_refused_before_a_change(worker, tmp_path):
    good = write(tmp_path / "good.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(Path(good).read_bytes()[:-5])
    longer = tmp_path / "longer.safetensors"
    longer.write_bytes(Path(good).read_bytes() + b"more")
    other = {**SHAPES, "model.layers.0.weight": (2, 8)}
    for file, says in (
        (write(tmp_path / "a.safetensors", drop=["model.layers.1.weight"]), "1 tensors differ.*`model.layers.1.weight` is missing"),
        (write(tmp_path / "b.safetensors", drop=["lm_head.weight"]), "`lm_head.weight` is missing"),
        (write(tmp_path / "c.safetensors", shapes=other), r"`model.layers.0.weight` is \[2, 8\], the model's is \[4, 4\]"),
        (write(tmp_path / "d.safetensors", shapes={**SHAPES, "more": (1,)}), "`more` is not in the model"),
        (write(tmp_path / "e.safetensors", version="8"), "of version `8`, not of version `7`"),
        (write(tmp_path / "f.safetensors", job="other"), "of job `other`, not of job `llama`"),
        (write(tmp_path / "g.safetensors", dtype="bf16"), "of dtype `bf16`, not of dtype `f32`"),
        (str(cut), "no whole safetensors file"),
        (str(longer), "no whole safetensors file"),
        (str(tmp_path / "none.safetensors"), "must see the feed's folder --to"),
    ):
        worker.start()
        with pytest.raises(DataError, match=says) as raised:
            worker.update(version="7", file=file)
        said = str(raised.value)
        assert said.startswith("version 7: ") and "nothing was loaded" in said and file in said
        assert worker.engine.model.calls == [], file
        with pytest.raises(MisuseError, match="before a version was loaded"):
            worker.engine.finish_weight_update()
    notes = tmp_path / "notes.safetensors"
    safetensors_torch.save_file({n: torch.zeros(s) for n, s in SHAPES.items()}, notes)
    worker.start()
    with pytest.raises(DataError, match="says no version"):
        worker.update(version="7", file=str(notes))
    worker.start()
    worker.update(version="7", file=good)
    worker.finish()


def test_calls_out_of_order_are_errors(vllm, worker, tmp_path):
    file = write(tmp_path / "good.safetensors")
    engine = worker.engine
    with pytest.raises(MisuseError, match="outside of an update"):
        engine.update_weights({"version": "7", "file": file})
    worker.start()
    with pytest.raises(MisuseError, match="amid another"):
        engine.start_weight_update()
    with pytest.raises(MisuseError, match="before a version was loaded"):
        worker.finish()
    assert worker.active
    # This is how a feed ends an update that another one left.
    with pytest.raises(ValueError, match="Invalid info"):
        worker.update()
    worker.start()
    worker.update(version="7", file=file)
    with pytest.raises(MisuseError, match="version 7 was sent after version 7 in one update"):
        worker.update(version="7", file=file)
    for bad in ({"version": 7, "file": file}, {"version": "7", "file": ""}):
        worker.start()
        with pytest.raises(ConfigError, match="give a text"):
            worker.update(**bad)
    with pytest.raises(ValueError, match="Invalid info"):
        worker.init({"job": "llama"})
    engine.shutdown()
    with pytest.raises(MisuseError, match="before /init_weight_transfer_engine"):
        worker.start()
    assert not engine.supports_draft_weight_update
    with pytest.raises(MisuseError, match="nothing is sent from a trainer"):
        engine.trainer_send_weights()


def test_failure_amid_a_load_leaves_nothing_for_the_next(worker, tmp_path):
    file = write(tmp_path / "good.safetensors")
    model = worker.engine.model
    model.fails_at = "model.layers.1.weight"
    worker.start()
    with pytest.raises(DataError, match="version 7 is half loaded, keep the server paused.*RuntimeError: shape mismatch"):
        worker.update(version="7", file=file)
    assert model.calls[-1] == "finalize" and (model.info.loaded_weights, model.info.load_numel) == ([], 0)
    with pytest.raises(MisuseError):
        worker.engine.finish_weight_update()
    model.fails_at = None
    worker.start()
    worker.update(version="7", file=file)
    worker.finish()


def test_tied_output_layer_may_be_absent(vllm, tmp_path):
    write(tmp_path / "base" / "model.safetensors")
    file = write(tmp_path / "tied.safetensors", drop=["lm_head.weight"])
    worker = worker_of(vllm, tmp_path / "base", tied=True)
    worker.init()
    worker.start()
    worker.update(version="7", file=file)
    worker.finish()


def test_weights_at_start_are_read_from_all_files(vllm, tmp_path):
    names = list(SHAPES)
    for i, part in enumerate((names[:2], names[2:])):
        write(tmp_path / "base" / f"part-{i}.safetensors", drop=[n for n in names if n not in part])
    write(tmp_path / "base" / "consolidated.safetensors", shapes={"of_mistral": (1,)})
    write(tmp_path / "base" / "stray.safetensors", shapes={"of_no_index": (1,)})
    parts = {name: f"part-{i // 2}.safetensors" for i, name in enumerate(names)}
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    worker = worker_of(vllm, tmp_path / "base")
    assert worker.engine._expected == {name: list(shape) for name, shape in SHAPES.items()}
    # A feed may remove the folder meanwhile.
    for path in (tmp_path / "base").iterdir():
        path.unlink()
    worker.init()
    with pytest.raises(ConfigError, match="in no safetensors files on this host: start it from a folder"):
        worker_of(vllm, tmp_path / "base").init()


def test_backend_may_be_registered_twice(vllm):
    vllm.register()
    vllm.register()
    assert Factory.registry == {"paraft": ("paraft.vllm", "ParaftWeightTransferEngine")}
    assert hasattr(vllm, Factory.registry["paraft"][1])


def test_package_declares_the_plugin():
    if IN_TREE:
        found = re.search(r'(?ms)^\[project\.entry-points\."vllm\.general_plugins"\]\n(.*?)\n\n', (PACKAGE / "pyproject.toml").read_text())
        assert found and found[1] == 'paraft = "paraft.vllm:register"'
    else:
        from importlib.metadata import distribution

        points = [(e.group, e.name, e.value) for e in distribution("paraft").entry_points]
        assert ("vllm.general_plugins", "paraft", "paraft.vllm:register") in points


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_paraft_needs_no_vllm_and_its_module_says_so():
    code = "import sys, paraft; assert 'paraft.vllm' not in sys.modules; import paraft.vllm"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": import_path()})
    assert out.stderr.endswith("ImportError: paraft.vllm is for processes of vLLM: install vllm\n"), out.stderr
