#!/usr/bin/env bash
# With which weights Lightning's StochasticWeightAveraging ends the training of a model with BatchNorm.
#
# Seen with pytorch-lightning 2.6.6 and torch 2.15.0 on the CPU. Expected from its documentation: the model ends with the average of the
# weights; a last pass over the training data only recomputes the statistics of BatchNorm at them. In fact:
#   - that pass ends with one more `optimizer.step()`, and `trainer.global_step` counts it;
#   - no gradient is computed or cleared before it: the optimizer is given the gradient of the last training step once more, and moves
#     the average. So the model ends beside it, by more than some of the training steps moved it;
#   - without BatchNorm there is no such pass and no such step.
# What this means for us: a step of that pass is left out (python/paraft/lightning.py, test_lightning_callbacks.py), so that a run with
# Paraft ends with the average itself.
#
#   findings/lightning-swa-ends-beside-the-average.sh     # PYTHON=... uses a Python that has both instead of installing them (2 GB)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z ${PYTHON:-} ]]; then
    python3 -m venv "$folder/venv"
    PYTHON=$folder/venv/bin/python
    "$PYTHON" -m pip install --quiet --disable-pip-version-check torch==2.15.0 pytorch-lightning==2.6.6
fi
cd "$folder"
cat >averages.py <<'PY'
import logging
import warnings

import pytorch_lightning as pl
import torch

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
assert torch.__version__.split("+")[0] == "2.15.0" and pl.__version__ == "2.6.6", (torch.__version__, pl.__version__)
BATCHES, EPOCHS = 5, 3


def flat(tensors):
    return torch.cat([t.detach().reshape(-1).clone() for t in tensors])


class Module(pl.LightningModule):
    def __init__(self, norm):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8) if norm else torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.before, self.gradients = [], []  # of each step: the weights before it, and its gradient

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.before.append(flat(self.parameters())))
        optimizer.register_step_post_hook(lambda *_: self.gradients.append(flat(p.grad for p in self.parameters())))
        return optimizer


def trained(norm):
    pl.seed_everything(0)
    module = Module(norm)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8 * BATCHES, 4)), batch_size=8)
    average = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, callbacks=[average], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, data)
    return module, trainer.global_step, flat(average._average_model.parameters())


for norm in (False, True):
    module, counted, average = trained(norm)
    beside = float((flat(module.parameters()) - average).abs().max())
    print(f"BatchNorm {norm}: {len(module.before)} steps, global_step {counted}, the model ends {beside:.4f} beside the average")
    assert len(module.before) == counted == BATCHES * EPOCHS + norm
    if norm:
        assert torch.equal(module.before[-1], average), "the last step begins at the average"
        assert torch.equal(module.gradients[-1], module.gradients[-2]), "with the gradient of the step before"
        assert beside > 1e-3
    else:
        assert beside == 0
PY
"$PYTHON" averages.py
