"""paraft.transformers against the real packages: a tiny GPT-2 of a config, with its tied head, trained by Hugging Face's Trainer."""

import os

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
        {"weight_decay": 0.3, "lr_scheduler_type": "linear", "warmup_steps": 4},
    ],
    ids=["dropout", "accumulate, clip", "two groups, schedule"],
)
def test_one_worker_trains_as_the_plain_trainer(fleet, tmp_path, how):
    plain = trainer(tmp_path, **how)
    plain.train()
    run = paraft.init(fleet, run_dir=str(tmp_path))
    looks = Looks(run)
    ours = paraft.transformers.prepare(run, trainer(tmp_path, callbacks=[looks], **how))
    ours.train()
    assert looks.evaluated == [False, True]  # of the final weights
    assert len(curve(plain)) == run.step == ours.state.global_step and run.over
    assert curve(plain)[-1] < curve(plain)[0] - 0.5
    assert (curve(plain) - curve(ours)).abs().max() < 1e-4
    loss, steps = recorded_loss(tmp_path)
    assert loss == pytest.approx(curve(plain)[:steps].mean().item(), abs=1e-3)
    assert (curve(plain, "eval_loss") - curve(ours, "eval_loss")).abs().max() < 1e-4
    assert ours.model.lm_head.weight is ours.model.transformer.wte.weight


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
    saved = os.path.join(folder, f"model-{run.rank}")
    ours.save_model(saved)
    assert ours.is_world_process_zero() == (run.rank == 0)
    return weights(ours.model).tolist(), curve(ours, "eval_loss").tolist(), ours.train_dataset.asked, os.listdir(os.path.join(folder, "out")), os.path.exists(saved)


def test_two_workers_train_as_one_with_their_batches_together(fleet, run_workers, tmp_path):
    one, other = run_workers(fleet, worker, 2, str(tmp_path), timeout=240).values
    assert one[:2] == other[:2]
    for epoch in (0, 128):
        assert sorted(one[2][epoch : epoch + 128] + other[2][epoch : epoch + 128]) == list(range(256))
    assert one[2][:128] != one[2][128:256]
    # Worker 0 alone has saved, and what it saved is a model of the package's.
    assert (one[4], other[4]) == (True, False) and sorted(one[3]) == ["checkpoint-16", "checkpoint-32"]
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model-0")
    assert torch.equal(weights(loaded), torch.tensor(one[0])) and loaded.lm_head.weight is loaded.transformer.wte.weight
    plain = trainer(tmp_path, kind=InOrderOfRanks, **TOGETHER)
    plain.train()
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


def test_what_cannot_be_done_is_refused_by_name(fleet, tmp_path, monkeypatch, caplog):
    run = paraft.init(fleet, workers=2)
    with pytest.raises(paraft.ConfigError, match="load_best_model_at_end: .*run.is_first"):
        paraft.transformers.prepare(run, trainer(tmp_path, load_best_model_at_end=True, save_strategy="epoch"))
    grouped = paraft.transformers.prepare(run, trainer(tmp_path, train_sampling_strategy="group_by_length"))
    with pytest.raises(paraft.ConfigError, match="group_by_length"):
        grouped.get_train_dataloader()
    stream = paraft.transformers.prepare(run, trainer(tmp_path))
    stream.train_dataset = Stream()
    assert stream._get_train_sampler() is None and "split_dataset_by_node" in caplog.text
    made = trainer(tmp_path)
    monkeypatch.setattr(made.accelerator, "scaler", object())
    with pytest.raises(paraft.ConfigError, match="bf16=True"):
        paraft.transformers.prepare(run, made)
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


@pytest.mark.parametrize("apply", ["servers", "mean"])
def test_accelerate_may_clip_the_mean_alone(fleet, apply):
    model = gpt2()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    run = paraft.init(fleet)
    run.prepare(model, optimizer.optimizer, apply=apply)
    batch = Counting(4, 1)[:4]
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    if apply == "mean":
        optimizer.step()
        assert run.step == 1
        return run.finish()
    with pytest.raises(paraft.MisuseError, match="clip_norm=1.0.*apply=\"mean\""):
        optimizer.step()


def test_loss_of_each_workers_own_tokens_is_a_log_line(fleet, tmp_path, caplog):
    for n, averages in ((2, True), (2, False), (1, True)):
        caplog.clear()
        paraft.transformers.prepare(paraft.init(fleet, workers=n), trainer(tmp_path, average_tokens_across_devices=averages))
        assert ("average_tokens_across_devices" in caplog.text) == (n == 2 and averages)
