"""paraft.accelerate against the real package: one script, with Accelerate's own Accelerator under DDP and with ours."""

import os

import pytest

import paraft

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")

import paraft.accelerate  # noqa: E402
import paraft.torch  # noqa: E402

#: On a busy machine a worker may be late.
PATIENT = {"cluster.grace_ms": 60_000}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

    def forward(self, x, y):
        out = self.net(x)
        return torch.nn.functional.cross_entropy(out, y), out


def samples(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return torch.utils.data.TensorDataset(x, (x[:, :3] + 0.3 * torch.randn(n, 3, generator=g)).argmax(1))


def script(accelerator, folder, counts=True):
    """A fine-tuning script of the usual kind: it knows nothing of Paraft. The last batch of an epoch is a short one."""
    accelerate.utils.set_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)  # else a last bit counts where gradients are tiny
    loader = torch.utils.data.DataLoader(samples(150, 1), batch_size=16, shuffle=True)
    tests = torch.utils.data.DataLoader(samples(70, 2), batch_size=16)
    steps = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / 40))
    model, optimizer, loader, tests, steps = accelerator.prepare(model, optimizer, loader, tests, steps)
    right, norms = [], []
    for _ in range(4):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss, _ = model(x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                steps.step()
                optimizer.zero_grad()
        model.eval()
        found = []
        for x, y in tests if counts else ():
            with torch.no_grad():
                _, out = model(x, y)
            found.append(torch.cat(accelerator.gather_for_metrics((out.argmax(1) == y,))))
        right.append(torch.cat(found).float().mean().item() if counts else 0.0)
        assert not counts or len(torch.cat(found)) == 70
    accelerator.wait_for_everyone()
    plain = accelerator.unwrap_model(model)
    saved = os.path.join(folder, f"{accelerator.process_index}.pt")
    if accelerator.is_main_process:
        accelerator.save(plain.state_dict(), saved)
    rate = steps.get_last_lr()[0]
    accelerator.end_training()
    return torch.cat([p.detach().reshape(-1) for p in plain.parameters()]).tolist(), right, norms, rate, os.path.exists(saved)


def config():
    return accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)


def under_ddp(folder):
    return script(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config()), folder)


def in_a_job(folder):
    run = paraft.init(settings=PATIENT)
    accelerator = paraft.accelerate.Accelerator(run=run, cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(paraft.MisuseError, match="gather_for_metrics: 2 workers.*init_process_group"):
        accelerator.gather_for_metrics(torch.ones(1))
    return script(accelerator, folder, counts=False)


def with_a_group(folder):
    run = paraft.init(settings=PATIENT)
    torch.distributed.init_process_group("gloo")
    accelerator = paraft.accelerate.Accelerator(run=run, cpu=True, gradient_accumulation_steps=2, dataloader_config=config())
    return script(accelerator, folder)


def test_a_script_trains_as_under_ddp(start_fleet, run_workers, tmp_path):
    for name in ("theirs", "ours", "grouped"):
        (tmp_path / name).mkdir()
    theirs = run_workers(None, under_ddp, 2, str(tmp_path / "theirs"), timeout=400).values
    ours = run_workers(start_fleet(1), in_a_job, 2, str(tmp_path / "ours"), timeout=400).values
    grouped = run_workers(start_fleet(1), with_a_group, 2, str(tmp_path / "grouped"), timeout=400).values
    for rank in (0, 1):
        for mine in (ours[rank], grouped[rank]):
            assert max(abs(a - b) for a, b in zip(theirs[rank][0], mine[0])) < 1e-4
            assert mine[2] == pytest.approx(theirs[rank][2], rel=1e-3) and mine[3] == pytest.approx(theirs[rank][3]) and mine[4] == (rank == 0)
        assert grouped[rank][1] == theirs[rank][1]


def test_one_worker_trains_as_accelerate_alone(fleet, tmp_path):
    theirs = script(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), str(tmp_path))
    run = paraft.init(fleet)
    accelerator = paraft.accelerate.Accelerator(run=run, cpu=True, gradient_accumulation_steps=2, overlap=True)
    ours = script(accelerator, str(tmp_path))
    assert max(abs(a - b) for a, b in zip(theirs[0], ours[0])) < 1e-5 and theirs[1] == ours[1]
    assert run.step == 20 and run.over
    with pytest.raises(paraft.MisuseError, match="an optimizer after the first"):
        accelerator.prepare(torch.optim.SGD(Model().parameters(), lr=0.1))
