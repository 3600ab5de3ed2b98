"""paraft.transformers against the real packages: a tiny GPT-2 of a config, with its tied head, trained by Hugging Face's Trainer."""

import os
import time

import pytest

import paraft
from conftest import recorded_loss

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import paraft.torch  # noqa: E402
import paraft.transformers  # noqa: E402

if not torch.cuda.is_available():
    # A torch that was installed without its CUDA libraries crashes when it is asked, and transformers asks at each step.
    torch.cuda.is_current_stream_capturing = lambda: False

def gpt2(dropout=0.0):
    """2 layers of 32, with the same first weights whenever it is made."""
    torch.manual_seed(0)
    drop = {name: dropout for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    config = transformers.GPT2Config(vocab_size=67, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **drop)
    return transformers.GPT2LMHeadModel(config)


class Counting(torch.utils.data.Dataset):
    """Counting in steps of 1 to 5, modulo 61; and which samples are asked for."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        first, by = torch.randint(0, 61, (n, 1), generator=g), torch.randint(1, 6, (n, 1), generator=g)
        self.ids = (first + by * torch.arange(16)) % 61
        self.asked = []

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        self.asked.append(i)
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Counting(8, 1))


class InOrderOfRanks(transformers.Trainer):
    """A plain Trainer that draws its samples as workers together do."""

    def _get_train_sampler(self, dataset=None):
        return torch.utils.data.DistributedSampler(self.train_dataset, 1, 0, shuffle=True, seed=self.args.seed)


class Scaled(transformers.Trainer):
    """With the GradScaler of ``fp16=True``, which Accelerate makes on a GPU alone; and with infinite gradients in step 5."""

    scale, on = 2.0**10, 0

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler, self.accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=self.scale), True

    def compute_loss(self, model, *args, **kwargs):
        loss = super().compute_loss(model, *args, **kwargs)
        return loss * float("inf") if model.training and self.state.global_step == 5 and self.args.process_index == self.on else loss


class ScaledInOrder(Scaled, InOrderOfRanks):
    pass


class ScaledOnOne(Scaled):
    """Worker 1 alone has infinite gradients."""

    on = 1


def trainer(folder, *, kind=transformers.Trainer, dropout=0.0, batch=16, callbacks=(), **options):
    options = {
        "lr_scheduler_type": "constant", "learning_rate": 3e-3, "num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "no",
        "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 7, **options,
    }  # fmt: skip
    args = transformers.TrainingArguments(str(folder), per_device_train_batch_size=batch, per_device_eval_batch_size=50, **options)
    return kind(gpt2(dropout), args, train_dataset=Counting(256, 1), eval_dataset=Counting(100, 2), callbacks=list(callbacks))


def curve(trained, key="loss"):
    return torch.tensor([line[key] for line in trained.state.log_history if key in line])


class Looks(transformers.TrainerCallback):
    """Whether the run was over when the Trainer evaluated, and when it saved."""

    def __init__(self, run):
        self.run, self.evaluated, self.saved = run, [], []

    def on_evaluate(self, *_, **__):
        self.evaluated.append(self.run.over)

    def on_save(self, *_, **__):
        self.saved.append(self.run.over)


def weights(model):
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


@pytest.mark.parametrize(
    "how",
    [
        {"dropout": 0.1},
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.3},
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0, "ours": {"overlap": True}},
        {"weight_decay": 0.3, "lr_scheduler_type": "linear", "warmup_steps": 4},
    ],
    ids=["dropout", "accumulate, clip", "accumulate, overlap", "two groups, schedule"],
)
def test_one_worker_trains_as_the_plain_trainer(fleet, tmp_path, how):
    how = dict(how)
    options = how.pop("ours", {})
    plain = trainer(tmp_path, **how)
    plain.train()
    run = paraft.init(fleet, run_dir=str(tmp_path))
    looks = Looks(run)
    ours = paraft.transformers.prepare(run, trainer(tmp_path, callbacks=[looks], **how), **options)
    ours.train()
    assert looks.evaluated == [False, True]  # of the final weights
    assert len(curve(plain)) == run.step == ours.state.global_step and run.over
    assert curve(plain)[-1] < curve(plain)[0] - 0.5
    assert (curve(plain) - curve(ours)).abs().max() < 1e-4
    assert (curve(plain, "grad_norm") / curve(ours, "grad_norm") - 1).abs().max() < 1e-3
    loss, steps = recorded_loss(tmp_path)
    assert loss == pytest.approx(curve(plain)[:steps].mean().item(), abs=1e-3)
    assert (curve(plain, "eval_loss") - curve(ours, "eval_loss")).abs().max() < 1e-4
    assert ours.model.lm_head.weight is ours.model.transformer.wte.weight


#: What runs each ``optim`` that needs no other package, and options of it.
OPTIMIZERS = {
    "adamw_torch": ("servers", ""),
    "adamw_torch_fused": ("servers", ""),
    "sgd": ("servers", "momentum=0.9,nesterov=true"),
    "adagrad": ("servers", "lr_decay=0.01,eps=1e-3"),
    "rmsprop": ("servers", "momentum=0.5,centered=true,eps=1e-3"),
    "adafactor": ("mean", ""),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_trains_as_the_plain_one(fleet, tmp_path, name):
    runs, options = OPTIMIZERS[name]
    rate = 0.05 if name == "sgd" else 3e-3
    how = {
        "optim": name, "optim_args": options or None, "adam_epsilon": 1e-3, "weight_decay": 0.1, "learning_rate": rate, "num_train_epochs": 1,
        "eval_strategy": "no", "lr_scheduler_type": "cosine",
    }  # fmt: skip
    plain = trainer(tmp_path, **how)
    first = weights(plain.model)
    plain.train()
    run = paraft.init(fleet)
    ours = paraft.transformers.prepare(run, trainer(tmp_path, **how))
    fronts = []
    prepare, run.prepare = run.prepare, lambda *args, **options: fronts.append((prepare(*args, **options), type(run._front()).__name__))
    ours.train()
    assert fronts[0][1] == {"servers": "OnServers", "mean": "OnMean"}[runs]
    moved = (weights(plain.model) - first).abs().max()
    assert moved > 1e-3 and (weights(plain.model) - weights(ours.model)).abs().max() < 1e-3 * moved + 1e-4


def test_every_other_optimizer_needs_a_package_that_it_names(tmp_path):
    names = {o.value for o in transformers.training_args.OptimizerNames}
    for name in sorted(names - set(OPTIMIZERS)):
        made = trainer(tmp_path, optim=name, optim_target_modules=["c_attn"])
        with pytest.raises((ImportError, ValueError)):
            made.create_optimizer()


def test_servers_clip_without_the_norm_if_they_are_asked_to(fleet, tmp_path):
    plain = trainer(tmp_path, max_grad_norm=0.3, num_train_epochs=1)
    plain.train()
    ours = paraft.transformers.prepare(paraft.init(fleet), trainer(tmp_path, num_train_epochs=1), clip_norm=0.3)
    ours.train()
    assert (curve(plain) - curve(ours)).abs().max() < 1e-4 and not len(curve(ours, "grad_norm"))


#: A schedule that a skipped step does not advance; and no step of full size for a gradient of nearly 0, as of Adam.
SCALED = {"fp16": True, "optim": "adamw_torch", "adam_epsilon": 1e-3, "lr_scheduler_type": "linear", "num_train_epochs": 1, "eval_strategy": "no"}


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("apply", ["servers", "mean"])
def test_steps_that_a_scaler_skips_are_those_of_the_plain_trainer(fleet, tmp_path, monkeypatch, optim, apply):
    """A scale that is too high at first, and infinite gradients: the schedule does what it does under Accelerate, which takes no
    step of a fused optimizer for skipped."""
    monkeypatch.setattr(Scaled, "scale", 2.0**24)
    how = {"kind": Scaled, **SCALED, "optim": optim}
    plain = trainer(tmp_path, **how)
    plain.train()
    run = paraft.init(fleet)
    ours = paraft.transformers.prepare(run, trainer(tmp_path, **how), apply=apply)
    ours.train()
    assert plain.accelerator.scaler.get_scale() == ours.accelerator.scaler.get_scale() < 2.0**24
    assert curve(plain, "learning_rate").tolist() == curve(ours, "learning_rate").tolist()
    assert (curve(plain) - curve(ours)).nan_to_num().abs().max() < 2e-3 and run.step == 16
    assert (weights(plain.model) - weights(ours.model)).abs().max() < 1e-3


def test_trainer_checkpoints_hold_server_state_and_resume(start_fleet, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 8, "lr_scheduler_type": "linear"}
    run = paraft.init(start_fleet(1))
    whole = paraft.transformers.prepare(run, trainer(tmp_path, **saving))
    whole.train()
    again = paraft.init(start_fleet(1))
    resumed = paraft.transformers.prepare(again, trainer(tmp_path / "again", **saving))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert run.step == 32 and again.step == 24
    largest = weights(whole.model).abs().max()
    assert (weights(whole.model) - weights(resumed.model)).abs().max() < 1e-4 * largest
    # The last one is saved behind the run's end, and has it too.
    for step in (8, 32):
        saved = torch.load(tmp_path / f"checkpoint-{step}" / "optimizer.pt", weights_only=False)
        assert {int(entry["step"]) for entry in saved["state"].values()} == {step} and len(saved["state"]) == 28



#: Two parameter groups, the default schedule, and a norm above the limit.
TOGETHER = {"weight_decay": 0.3, "lr_scheduler_type": "linear", "max_grad_norm": 0.3}


def worker(folder):
    run = paraft.transformers.init()
    ours = trainer(os.path.join(folder, "out"), batch=8, save_strategy="epoch", **TOGETHER)
    paraft.transformers.prepare(run, ours).train()
    norms = curve(ours, "grad_norm").tolist()
    saved = os.path.join(folder, f"model-{run.rank}")
    ours.save_model(saved)
    assert ours.is_world_process_zero() == (run.rank == 0)
    return weights(ours.model).tolist(), curve(ours, "eval_loss").tolist(), ours.train_dataset.asked, os.listdir(os.path.join(folder, "out")), os.path.exists(saved), norms


def scaled_worker(folder, other):
    done = []
    for apply, servers in (("servers", None), ("mean", other)):
        run = paraft.transformers.init(servers=servers)
        ours = trainer(os.path.join(folder, "out"), kind=ScaledOnOne, batch=8, **SCALED)
        paraft.transformers.prepare(run, ours, apply=apply).train()
        done.append((weights(ours.model).tolist(), curve(ours, "learning_rate").tolist(), run.stats()["skipped"]))
    return done


def test_a_step_that_one_workers_scaler_skips_is_skipped_by_all(start_fleet, run_workers, tmp_path):
    plain = trainer(tmp_path, kind=ScaledInOrder, **SCALED)
    plain.train()
    other = ",".join(start_fleet(1).servers)
    for worker in run_workers(start_fleet(1), scaled_worker, 2, str(tmp_path), other, timeout=240).values:
        for ours, rates, skipped in worker:
            assert rates == curve(plain, "learning_rate").tolist()
            assert (weights(plain.model) - torch.tensor(ours)).abs().max() < 2e-3
        assert worker[0][2] == 1


def test_two_workers_train_as_one_with_their_batches_together(fleet, run_workers, tmp_path):
    one, other = run_workers(fleet, worker, 2, str(tmp_path), timeout=240).values
    assert one[:2] == other[:2] and one[5] == other[5]
    for epoch in (0, 128):
        assert sorted(one[2][epoch : epoch + 128] + other[2][epoch : epoch + 128]) == list(range(256))
    assert one[2][:128] != one[2][128:256]
    # Worker 0 alone has saved, and what it saved is a model of the package's.
    assert (one[4], other[4]) == (True, False) and sorted(one[3]) == ["checkpoint-16", "checkpoint-32"]
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model-0")
    assert torch.equal(weights(loaded), torch.tensor(one[0])) and loaded.lm_head.weight is loaded.transformer.wte.weight
    plain = trainer(tmp_path, kind=InOrderOfRanks, **TOGETHER)
    plain.train()
    assert (curve(plain, "grad_norm") / torch.tensor(one[5]) - 1).abs().max() < 1e-2, "the norm of the mean"
    assert (curve(plain, "eval_loss") - torch.tensor(one[1])).abs().max() < 1e-3
    assert (weights(plain.model) - torch.tensor(one[0])).abs().max() < 1e-3


def test_a_stop_by_a_callback_and_the_best_checkpoint(fleet, tmp_path):
    # The highest loss is taken for the best: that of the first epoch.
    how = {"num_train_epochs": 4, "save_strategy": "epoch", "load_best_model_at_end": True, "greater_is_better": True}
    plain = trainer(tmp_path / "plain", callbacks=[transformers.EarlyStoppingCallback(1)], **how)
    plain.train()
    run = paraft.init(fleet)
    looks = Looks(run)
    ours = paraft.transformers.prepare(run, trainer(tmp_path / "ours", callbacks=[transformers.EarlyStoppingCallback(1), looks], **how))
    ours.train()
    assert looks.evaluated == [False, False] and looks.saved == [False, True]
    assert plain.state.global_step == ours.state.global_step == run.step == 32
    assert os.path.basename(ours.state.best_model_checkpoint) == "checkpoint-16"
    best, last = (transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours" / f"checkpoint-{n}") for n in (16, 32))
    assert torch.equal(weights(best), weights(ours.model)) and not torch.equal(weights(best), weights(last))
    assert (weights(plain.model) - weights(ours.model)).abs().max() < 1e-4


#: The highest loss is taken for the best: that of the first epoch.
BEST = {
    **TOGETHER, "num_train_epochs": 4, "save_strategy": "epoch", "load_best_model_at_end": True, "greater_is_better": True, "save_total_limit": 2,
}  # fmt: skip


def best_worker(folder, servers):
    """Stops after the second epoch with the weights of the first; then continues from a checkpoint of the second, and from one
    without the optimizer's state."""
    patient = {"cluster.grace_ms": 60_000}
    out, done = os.path.join(folder, "out"), []
    run = paraft.transformers.init(servers=servers[0], settings=patient)
    ours = trainer(out, batch=8, callbacks=[transformers.EarlyStoppingCallback(1)], **BEST)
    paraft.transformers.prepare(run, ours).train()
    done.append((weights(ours.model).tolist(), ours.state.global_step))
    while not os.path.exists(os.path.join(out, "checkpoint-32", "trainer_state.json")):
        time.sleep(0.05)  # worker 0 still writes it
    again = paraft.init(servers=servers[1], rank=run.rank, workers=2, settings=patient)
    ours = trainer(out, batch=8, **{**BEST, "load_best_model_at_end": False})
    paraft.transformers.prepare(again, ours).train(resume_from_checkpoint=os.path.join(out, "checkpoint-32"))
    done.append((weights(ours.model).tolist(), again.step))
    bare = paraft.init(servers=servers[2], rank=run.rank, workers=2, settings=patient)
    out = os.path.join(folder, "bare")
    ours = trainer(out, batch=8, **{**BEST, "num_train_epochs": 1, "load_best_model_at_end": False, "save_only_model": True})
    paraft.transformers.prepare(bare, ours).train()
    saved = os.path.join(out, "checkpoint-16")
    done.append((weights(ours.model).tolist(), sorted(os.listdir(saved)) if bare.is_first else []))
    late = paraft.init(servers=servers[3], rank=run.rank, workers=2, mode="asp")
    try:
        paraft.transformers.prepare(late, trainer(out, batch=8, **BEST)).train()
    except paraft.ConfigError as e:
        done.append(str(e))
    late.close()
    return done


def test_two_workers_stop_load_the_best_and_resume(start_fleet, run_workers, tmp_path):
    servers = [start_fleet(1).servers for _ in range(4)]
    one, other = run_workers(None, best_worker, 2, str(tmp_path), servers, timeout=500).values
    assert one[:2] == other[:2] and one[2][0] == other[2][0] and "mode asp" in one[3]
    plain = trainer(tmp_path / "plain", kind=InOrderOfRanks, callbacks=[transformers.EarlyStoppingCallback(1)], **BEST)
    plain.train()
    assert plain.state.global_step == one[0][1] == 32
    assert (weights(plain.model) - torch.tensor(one[0][0])).abs().max() < 1e-3
    assert "checkpoint-16" in os.listdir(tmp_path / "out"), "the best is kept"
    plain = trainer(tmp_path / "plain", kind=InOrderOfRanks, **{**BEST, "load_best_model_at_end": False})
    plain.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-32"))
    assert one[1][1] == 32, "steps since"
    assert (weights(plain.model) - torch.tensor(one[1][0])).abs().max() < 2e-3
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "bare" / "checkpoint-16")
    assert torch.equal(weights(loaded), torch.tensor(one[2][0]))
    assert "model.safetensors" in one[2][1] and not {"optimizer.pt", "rng_state_0.pth"} & set(one[2][1])


def test_what_cannot_be_done_is_refused_by_name(fleet, tmp_path, monkeypatch, caplog):
    run = paraft.init(fleet, workers=2)
    grouped = paraft.transformers.prepare(run, trainer(tmp_path, train_sampling_strategy="group_by_length"))
    with pytest.raises(paraft.ConfigError, match="group_by_length"):
        grouped.get_train_dataloader()
    stream = paraft.transformers.prepare(run, trainer(tmp_path))
    stream.train_dataset = Stream()
    assert stream._get_train_sampler() is None and "split_dataset_by_node" in caplog.text
    made = trainer(tmp_path)
    monkeypatch.setattr(made.accelerator.state, "num_processes", 2)
    with pytest.raises(paraft.ConfigError, match=r"paraft.transformers.init\(\)"):
        paraft.transformers.prepare(run, made)
    paraft.torch.LeasedSampler(run, range(8), batch_size=2, epochs=1)
    with pytest.raises(paraft.ConfigError, match="leased samples"):
        paraft.transformers.prepare(run, trainer(tmp_path))


def test_accelerate_alone(fleet):
    def loop(run=None):
        model = gpt2()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loader = torch.utils.data.DataLoader(Counting(128, 1), batch_size=16)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if run is not None:
            run.prepare(accelerator.unwrap_model(model), optimizer.optimizer)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    run = paraft.init(fleet)
    assert (loop() - loop(run)).abs().max() < 1e-5 and run.step == 4
    run.finish()


def test_loss_of_each_workers_own_tokens_is_a_log_line(fleet, tmp_path, caplog):
    for n, averages in ((2, True), (2, False), (1, True)):
        caplog.clear()
        paraft.transformers.prepare(paraft.init(fleet, workers=n), trainer(tmp_path, average_tokens_across_devices=averages))
        assert ("average_tokens_across_devices" in caplog.text) == (n == 2 and averages)


class Bags(torch.nn.Module):
    """The next number, by the mean of the rows of those before: of a table or of torch's own layer."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.head = layer, torch.nn.Linear(8, 61)

    def forward(self, input_ids, labels):
        logits = self.head(self.layer(input_ids[:, :-1]))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels[:, -1]), "logits": logits}


def test_rows_train_as_torchs_layer(start_fleet, tmp_path):
    def fit(layer, run=None, **how):
        args = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=16, lr_scheduler_type="constant", learning_rate=0.5, optim="sgd", num_train_epochs=2,
            eval_strategy="epoch", logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=7, max_grad_norm=0.2, **{"save_strategy": "no", **how},
        )  # fmt: skip
        made = transformers.Trainer(Bags(layer), args, train_dataset=Counting(256, 1), eval_dataset=Counting(100, 2))
        (paraft.transformers.prepare(run, made) if run else made).train()
        return made

    def rows(i):
        return paraft.torch.Table(f"t{i}", 8, max_rows=100, optimizer={"kind": "sgd", "lr": 0.5}, init={"kind": "normal", "std": 0.3})

    seen = []
    table, run = rows(0), paraft.init(start_fleet(1))
    layer = paraft.torch.EmbeddingBag(table)

    def look(*_):
        seen.append(table.rows(torch.arange(61)))

    layer.register_forward_pre_hook(look)
    ours = fit(layer, run)
    plain = fit(torch.nn.EmbeddingBag.from_pretrained(seen[0].clone(), freeze=False))
    assert len(curve(plain)) == run.step and (seen[-1] - seen[0]).abs().max() > 0.01
    for of in ("loss", "grad_norm", "eval_loss"):
        assert (curve(plain, of) - curve(ours, of)).abs().max() < 1e-3, of
    with pytest.raises(paraft.ConfigError, match="load_best_model_at_end: the rows of table `t1`"):
        fit(paraft.torch.EmbeddingBag(rows(1)), paraft.init(start_fleet(1)), load_best_model_at_end=True, save_strategy="epoch")
