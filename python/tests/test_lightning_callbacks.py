"""Callbacks of Lightning that average weights, or change how batches are accumulated; modules that clip themselves. On two workers, against
plain Lightning with the samples of both."""

import os

import pytest

import paraft

torch = pytest.importorskip("torch")
pl = pytest.importorskip("lightning.pytorch")

import paraft.torch  # noqa: E402
from paraft.lightning import ParaftStrategy  # noqa: E402
from test_lightning import Module, fit, weights  # noqa: E402
from torch.utils.data import DistributedSampler  # noqa: E402


class Normed(Module):
    """With running statistics; its batches are of both workers only where they are not used."""

    def __init__(self):
        super().__init__("sgd")
        self.net.append(torch.nn.BatchNorm1d(3, momentum=0.1))


class Clips(Module):
    """Clips every second step, by the Trainer's bound."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.trainer.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm)


class Backbone(Module):
    """Its first layer is frozen at first, in a parameter group of its own."""

    @property
    def backbone(self):
        return self.net[0]

    def configure_optimizers(self):
        return torch.optim.AdamW([{"params": self.net[2].parameters()}, {"params": self.net[0].parameters(), "lr": 0.005}], lr=0.02)


def swa(**options):
    return pl.callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=1, **options)


#: What a fit is given, made anew for each.
CASES = {
    "swa": lambda: {"callbacks": [swa()], "epochs": 4},
    "ema": lambda: {"callbacks": [pl.callbacks.EMAWeightAveraging(decay=0.8)], "epochs": 3},
    "accumulation": lambda: {"callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})], "epochs": 3},
    "finetuning": lambda: {
        "module": Backbone, "callbacks": [pl.callbacks.BackboneFinetuning(1, backbone_initial_lr=0.005)], "epochs": 3, "gradient_clip_val": 0.5
    },
    "clipping": lambda: {"module": Clips, "gradient_clip_val": 0.1, "epochs": 3},
}


def worker(folder, servers):
    done = {}
    for case, addresses in servers.items():
        saves = pl.callbacks.ModelCheckpoint(os.path.join(folder, case), save_last=True, filename="best", monitor="right", mode="max")
        how = {"module": lambda: Module("sgd"), **CASES[case]()}
        how["callbacks"] = [*how.get("callbacks", []), saves]
        run = paraft.init(servers=addresses, settings={"cluster.grace_ms": 60_000})
        module, trainer, _ = fit(folder, ParaftStrategy(run), batch=16, enable_checkpointing=True, **how)
        done[case] = weights(module).tolist(), trainer.global_step, trainer.callback_metrics["right"].item()
    return done


def test_callbacks_on_two_workers_are_those_of_one(start_fleet, run_workers, tmp_path):
    servers = {case: start_fleet(1).servers for case in CASES}
    one, other = run_workers(None, worker, 2, str(tmp_path), servers, timeout=500).values
    by_rank = lambda data: DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=5)  # noqa: E731
    for case, how in CASES.items():
        plain, trainer, _ = fit(tmp_path, sampler=by_rank, **{"module": lambda: Module("sgd"), **how()})
        assert one[case][:2] == other[case][:2], case
        assert one[case][1] == trainer.global_step, case
        assert (weights(plain) - torch.tensor(one[case][0])).abs().max() < 1e-5, case
        assert abs(one[case][2] - trainer.callback_metrics["right"].item()) < 0.02, case


@pytest.mark.parametrize("apply", ["servers", "mean"])
def test_averages_of_a_model_with_running_statistics(start_fleet, tmp_path, apply):
    """SWA passes over the samples once more behind the last step, and the average is what stays; the optimizer's state is saved."""
    for callback in (swa, lambda: pl.callbacks.EMAWeightAveraging(decay=0.8)):
        plain, _, _ = fit(tmp_path, module=Normed, epochs=3, callbacks=[callback()])
        saves = pl.callbacks.ModelCheckpoint(tmp_path / "saved")
        ours, trainer, _ = fit(
            tmp_path, ParaftStrategy(paraft.init(start_fleet(1)), apply=apply), module=Normed, epochs=3, callbacks=[callback(), saves],
            enable_checkpointing=True,
        )  # fmt: skip
        for mine, theirs in zip(ours.state_dict().values(), plain.state_dict().values()):
            assert torch.allclose(mine.float(), theirs.float(), atol=1e-5)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
