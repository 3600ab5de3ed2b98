"""paraft.lightning against the real package: what plain Lightning does, and what differs is said."""

import os

import pytest

import paraft
from conftest import recorded_loss

torch = pytest.importorskip("torch")
pl = pytest.importorskip("lightning.pytorch")

import paraft.torch  # noqa: E402
from paraft.lightning import ParaftStrategy  # noqa: E402
from torch.utils.data import DataLoader, Dataset, DistributedSampler  # noqa: E402

class Samples(Dataset):
    """Three clusters on a plane, some of them mixed up, and which are asked for."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 3, (n,), generator=g)
        middle = torch.tensor([[0.0, 1.0], [0.9, -0.5], [-0.9, -0.5]])[self.y]
        self.x = middle + 0.45 * torch.randn(n, 2, generator=g)
        self.asked = []

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        self.asked.append(i)
        return self.x[i], self.y[i]


class Module(pl.LightningModule):
    def __init__(self, optimizer="adamw", schedule=False, sync=False):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3))
        self.kind, self.schedule, self.sync = optimizer, schedule, sync
        self.losses = []
        self.automatic_optimization = optimizer != "two"
        self.steps = 0

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        self.log("loss", loss)
        if not self.automatic_optimization:
            # Each in turn, as a GAN's.
            first, second = self.optimizers()
            one = first if self.steps % 2 else second
            self.steps += 1
            self.toggle_optimizer(one)
            one.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(one, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            one.step()
            self.untoggle_optimizer(one)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        right = (self.net(x).argmax(1) == y).float().mean()
        self.log("right", right, on_epoch=True, sync_dist=self.sync)

    def configure_optimizers(self):
        p = self.parameters()
        made = {
            "adamw": lambda: torch.optim.AdamW(p, lr=0.01),
            "nesterov": lambda: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
            "sgd": lambda: torch.optim.SGD(p, lr=0.1),
            "two": lambda: [torch.optim.Adam(self.net[0].parameters(), lr=0.01), torch.optim.SGD(self.net[2].parameters(), lr=0.1)],
        }[self.kind]()
        made = made if isinstance(made, list) else [made]
        return made, [torch.optim.lr_scheduler.StepLR(made[0], 1, 0.5)] if self.schedule else []


def fit(folder, strategy="auto", *, module=None, optimizer="adamw", epochs=2, batch=32, n=320, ckpt=None, sampler=None, seed=5, plugins=None, **options):
    """A module, trained by a script that knows nothing of Paraft but its strategy."""
    pl.seed_everything(seed)
    module = module() if module else Module(optimizer)
    train = Samples(n, seed=1)
    options = {"callbacks": [], "enable_checkpointing": False, **options, "plugins": plugins and plugins()}
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=epochs, logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **options,
    )  # fmt: skip
    loader = DataLoader(train, batch_size=batch, sampler=sampler(train) if sampler else None, shuffle=None if sampler else True)
    trainer.fit(module, loader, DataLoader(Samples(600, seed=2), batch_size=100), ckpt_path=ckpt)
    return module, trainer, train


def fp16():
    """With a scale that is too high at first: some steps are skipped."""
    return pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**26))


def weights(module):
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


@pytest.mark.parametrize(
    "how",
    [
        {"optimizer": "adamw"},
        {"optimizer": "adamw", "gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
        {"optimizer": "nesterov", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"optimizer": "adamw", "precision": "bf16-mixed"},
        {"plugins": lambda: [fp16()], "gradient_clip_val": 0.1},
        {"module": lambda: Module("nesterov", schedule=True), "epochs": 3},
        {"optimizer": "two"},
    ],
    ids=["adamw", "clip by norm, accumulate", "clip by value", "bf16", "fp16", "schedule", "two optimizers"],
)
def test_one_worker_trains_as_plain_lightning(fleet, tmp_path, how):
    pl.seed_everything(5)
    first = weights(Module())
    plain, _, _ = fit(tmp_path, **how)
    run = paraft.init(fleet, run_dir=str(tmp_path))
    ours, trainer, _ = fit(tmp_path, ParaftStrategy(run), **how)
    assert (weights(plain) - first).abs().max() > 0.01
    assert (weights(plain) - weights(ours)).abs().max() < 1e-6
    assert trainer.global_step == run.step > 0 and run.over
    if "accumulate_grad_batches" not in how:  # else of the last batch
        loss, steps = recorded_loss(tmp_path)
        assert loss == pytest.approx(sum(plain.losses[:steps]) / steps, abs=1e-3)
    assert "plugins" not in how or trainer.precision_plugin.scaler.get_scale() < 2.0**26


def test_overlap_accumulates_too(fleet, tmp_path):
    how = {"accumulate_grad_batches": 2, "epochs": 1}
    plain, _, _ = fit(tmp_path, **how)
    ours, _, _ = fit(tmp_path, ParaftStrategy(paraft.init(fleet), overlap=True), **how)
    assert (weights(plain) - weights(ours)).abs().max() < 1e-6


def test_checkpoints_of_lightning_resume(start_fleet, tmp_path, caplog):
    straight, _, _ = fit(tmp_path, optimizer="sgd", epochs=4)
    path = str(tmp_path / "half.ckpt")
    _, trainer, _ = fit(tmp_path, ParaftStrategy(paraft.init(start_fleet(1))), optimizer="sgd", epochs=2, enable_checkpointing=True)
    trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["global_step"] == 20
    # Another seed: the weights are those of the file, and the samples come in another order, as in plain Lightning.
    plain, _, _ = fit(tmp_path, optimizer="sgd", epochs=4, seed=6, ckpt=path)
    ours, _, _ = fit(tmp_path, ParaftStrategy(paraft.init(start_fleet(1))), optimizer="sgd", epochs=4, seed=6, ckpt=path)
    assert (weights(plain) - weights(ours)).abs().max() < 1e-6 < (weights(plain) - weights(straight)).abs().max()
    assert "before run.finish()" in caplog.text, "what was saved after the fit has no moments"


def test_optimizer_state_survives_a_lightning_checkpoint(start_fleet, tmp_path):
    files = []
    for at, strategy in (("plain", "auto"), ("ours", ParaftStrategy(paraft.init(start_fleet(1))))):
        saves = pl.callbacks.ModelCheckpoint(tmp_path / at, save_last=True)
        fit(tmp_path, strategy, epochs=2, enable_checkpointing=True, callbacks=[saves])
        files.append(str(tmp_path / at / "last.ckpt"))
    theirs, saved = (torch.load(f, weights_only=True)["optimizer_states"][0]["state"] for f in files)
    assert saved.keys() == theirs.keys()
    assert all(torch.allclose(saved[i][k], v, atol=1e-6) for i, entry in theirs.items() for k, v in entry.items())
    straight, _, _ = fit(tmp_path, epochs=4, seed=6, ckpt=files[0])
    for file in files:
        ours, _, _ = fit(tmp_path, ParaftStrategy(paraft.init(start_fleet(1))), epochs=4, seed=6, ckpt=file)
        assert (weights(straight) - weights(ours)).abs().max() < 1e-5


def worker(folder, others):
    """A worker of two, first without a process group, then, on other servers, with one: by it they also see each other's values."""
    alone = part(folder, ParaftStrategy(), [])
    torch.distributed.init_process_group("gloo")
    # Never satisfied: it stops after the second epoch.
    stop = pl.callbacks.EarlyStopping("right", patience=1, min_delta=2.0, mode="max")
    together = part(folder, ParaftStrategy(paraft.init(servers=others)), [stop], sync=True)
    torch.distributed.destroy_process_group()
    return alone, together


def part(folder, strategy, callbacks, sync=False):
    saved = pl.callbacks.ModelCheckpoint(os.path.join(folder, f"{sync}-by-{strategy.run.rank}"), save_top_k=-1)
    options = {"epochs": 3, "batch": 16, "callbacks": [*callbacks, saved], "enable_checkpointing": True}
    module, trainer, train = fit(folder, strategy, module=lambda: Module(schedule=True, sync=sync), **options)
    assert trainer.is_global_zero == (strategy.run.rank == 0) and trainer.world_size == 2
    files = os.listdir(saved.dirpath) if os.path.isdir(saved.dirpath) else []
    return weights(module).tolist(), trainer.callback_metrics["right"].item(), train.asked, trainer.current_epoch, files


def test_two_workers_train_as_one_with_their_batches_together(start_fleet, run_workers, tmp_path):
    """And a process group serves for what needs all workers at once."""
    others = ",".join(start_fleet(1).servers)
    first, second = run_workers(start_fleet(1), worker, 2, str(tmp_path), others, timeout=240).values
    (one, right, asked, _, files), (other, _, asked_too, _, none) = first[0], second[0]
    assert one == other
    for epoch in range(0, 480, 160):
        assert sorted(asked[epoch : epoch + 160] + asked_too[epoch : epoch + 160]) == list(range(320))
    assert len(files) == 3 and not none
    by_rank = lambda data: DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=5)  # noqa: E731
    plain, trainer, _ = fit(tmp_path, module=lambda: Module(schedule=True), epochs=3, batch=32, sampler=by_rank)
    assert (weights(plain) - torch.tensor(one)).abs().max() < 1e-5
    assert abs(right - trainer.callback_metrics["right"].item()) < 0.05

    (one, right, _, epochs, _), (other, right_too, _, epochs_too, _) = first[1], second[1]
    assert one == other and right == right_too and epochs == epochs_too == 2


def test_what_cannot_be_done_is_refused_by_name(fleet, tmp_path):
    run = paraft.init(fleet, workers=2)
    stop = pl.callbacks.EarlyStopping("right", patience=1)
    for how, why in [
        ({"callbacks": [stop]}, "EarlyStopping: .*init_process_group"),
        ({"strategy": ParaftStrategy(run, clip_norm=2.0), "gradient_clip_val": 1.0}, "name one"),
    ]:
        with pytest.raises(paraft.ConfigError, match=why):
            fit(tmp_path, **{"strategy": ParaftStrategy(run), **how})
    leased = paraft.init(fleet)
    paraft.torch.LeasedSampler(leased, range(8), batch_size=2, epochs=1)
    with pytest.raises(paraft.ConfigError, match="leased samples"):
        fit(tmp_path, ParaftStrategy(leased))
    quiet = {"logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    for sync in (False, True):
        trainer = pl.Trainer(strategy=ParaftStrategy(run), accelerator="cpu", **quiet)
        loader = DataLoader(Samples(64, seed=2), batch_size=32)
        if not sync:
            assert 0.0 < trainer.validate(Module(), loader)[0]["right"] < 1.0
            continue
        with pytest.raises(paraft.MisuseError, match="sync_dist=True: .*init_process_group"):
            trainer.validate(Module(sync=True), loader)
    with pytest.raises(paraft.MisuseError, match="all_gather"):
        trainer.strategy.all_gather(torch.ones(1))
    assert (trainer.strategy.local_rank, trainer.world_size, trainer.num_nodes) == (0, 2, 1)
    only = pl.utilities.rank_zero.rank_zero_only
    ParaftStrategy(paraft.init(fleet, workers=2, rank=1))
    assert only.rank == 1
    only.rank = 0


def test_the_module_itself_clips_the_mean(start_fleet, tmp_path):
    class Clips(Module):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    for apply, plugins in [("servers", None), ("mean", None), ("mean", lambda: [fp16()])]:
        ours, _, _ = fit(tmp_path, ParaftStrategy(paraft.init(start_fleet(1)), apply=apply), module=Clips, plugins=plugins)
        theirs, _, _ = fit(tmp_path, module=Clips, plugins=plugins)
        assert (weights(theirs) - weights(ours)).abs().max() <= (1e-6 if apply == "servers" else 0)


class Bags(pl.LightningModule):
    """Over rows, of a table or of torch's own layer."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.net = layer, torch.nn.Linear(4, 3)

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(self.layer((x.abs() * 4).long())), y)

    def on_train_start(self):
        self.first = self.rows()

    def training_step(self, batch, _):
        return self.loss(batch)

    def validation_step(self, batch, _):
        self.log("loss", self.loss(batch), on_epoch=True)

    def on_train_epoch_end(self):
        self.last = self.rows()

    def rows(self):
        table = getattr(self.layer, "table", None)
        return table.rows(torch.arange(20)) if table else self.layer.weight.detach().clone()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("how", [{"gradient_clip_val": 0.05}, {"plugins": lambda: [fp16()]}], ids=["clip by norm", "fp16"])
def test_rows_train_as_torchs_layer(fleet, tmp_path, how):
    table = paraft.torch.Table("t", 4, max_rows=100, optimizer={"kind": "sgd", "lr": 0.5}, init={"kind": "normal", "std": 0.3})
    ours, trainer, _ = fit(tmp_path, ParaftStrategy(paraft.init(fleet)), module=lambda: Bags(paraft.torch.EmbeddingBag(table)), **how)
    plain, other, _ = fit(tmp_path, module=lambda: Bags(torch.nn.EmbeddingBag.from_pretrained(ours.first.clone(), freeze=False)), **how)
    assert (ours.last - ours.first).abs().max() > 0.02
    assert (ours.last - plain.last).abs().max() < 1e-5
    assert (weights(ours.net) - weights(plain.net)).abs().max() < 1e-5
    assert trainer.callback_metrics["loss"] == pytest.approx(other.callback_metrics["loss"].item(), abs=1e-4)
