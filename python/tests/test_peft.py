"""Low-rank adapters of peft: they alone travel."""

import time

import pytest

import paraft

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

import paraft.transformers  # noqa: E402
from test_transformers import InOrderOfRanks, curve, gpt2, trainer  # noqa: E402


def adapted(folder, rank=0, **options):
    """A Trainer of adapters in the attention."""
    made = trainer(folder, num_train_epochs=1, eval_strategy="no", **options)
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight += 0.1 * rank
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM", init_lora_weights=True)
    made.model = made.model_wrapped = peft.get_peft_model(model, config)
    return made


def adapters(model):
    return [p for p in model.parameters() if p.requires_grad]


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in adapters(model)])


def worker(folder):
    run = paraft.transformers.init(settings={"cluster.grace_ms": 60_000})
    ours = adapted(folder, batch=8)
    paraft.transformers.prepare(run, ours).train()
    return flat(ours.model).tolist(), run.stats()["bytes_pushed"] / run.step


def test_adapters_alone_travel(fleet, run_workers, tmp_path):
    plain = adapted(tmp_path, kind=InOrderOfRanks)
    first = flat(plain.model)
    plain.train()
    assert curve(plain)[-1] < curve(plain)[0] and (flat(plain.model) - first).abs().max() > 0.01
    for ours, pushed in run_workers(fleet, worker, 2, str(tmp_path), timeout=400).values:
        assert (flat(plain.model) - torch.tensor(ours)).abs().max() < 2e-3
        assert pushed == 4 * first.numel() < 4 * sum(p.numel() for p in plain.model.parameters()) / 10


def joins(folder):
    run = paraft.transformers.init(settings={"cluster.timeout_ms": 60_000})
    paraft.transformers.prepare(run, adapted(folder, run.rank, batch=8)).train()


def test_other_base_weights_are_refused_by_name(fleet, start_workers, tmp_path):
    workers = start_workers(fleet, joins, 2, str(tmp_path))
    until = time.monotonic() + 120
    while not (refused := [w for w in workers if w.process.poll() is not None]) and time.monotonic() < until:
        time.sleep(0.05)
    assert refused and "ConfigError" in refused[0].err and "c_fc" in refused[0].err, [w.said() for w in workers]
