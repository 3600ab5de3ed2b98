"""What runs around a loop: torch's compiler and checkpointing of activations, an event loop, a notebook."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import paraft  # noqa: E402
import paraft.torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

#: Such that the small model has several, pushed during the backward pass.
SMALL_BUCKETS = {"cluster.bucket_bytes": 1024}


class Checkpointed(nn.Module):
    """Its activations are computed again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def compiled(m: nn.Module) -> nn.Module:
    """By torch's compiler, but for the last stage, which needs a C++ compiler."""
    return torch.compile(m, backend="aot_eager")


@pytest.mark.parametrize("wrap", [Checkpointed, compiled])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_wrapped_model_trains_as_the_plain_one(wrap: Any, before: bool, overlap: bool, fleet: Any) -> None:
    run = paraft.init(fleet, settings=SMALL_BUCKETS)
    m, plain = models.model("mlp"), models.model("mlp")
    o, po = models.optimizer("momentum", m), models.optimizer("momentum", plain)
    trains = wrap(m) if before else m
    trains, o = run.prepare(trains, o, overlap=overlap)
    trains = trains if before else wrap(trains)
    for batch in models.batches("mlp", 0, 10):
        for one, its in ((trains, o), (plain, po)):
            models.loss(one, batch).backward()
            its.step()
            its.zero_grad()
    run.finish()
    for a, b in zip(m.parameters(), plain.parameters()):
        assert torch.allclose(a, b, atol=1e-6)


def test_compiled_blocks_push_during_the_backward_pass(fleet: Any) -> None:
    run = paraft.init(fleet, settings=SMALL_BUCKETS)
    m = models.model("mlp")
    for i in (0, 2):
        m[i].compile(backend="aot_eager")
    m, o = run.prepare(m, models.optimizer("sgd", m), overlap=True)
    pushed: list[set[int]] = []  # parameters, when the gradient reaches what is between the blocks
    m[1].register_forward_hook(lambda _, args, out: out.register_hook(lambda _: pushed.append(set(o._paraft._pushed))) and None)
    for batch in models.batches("mlp", 0, 3):
        models.loss(m, batch).backward()
        assert o._paraft.is_early is (run.step > 0)  # the first step shows whether it may be
        o.step()
        o.zero_grad()
    run.finish()
    assert pushed == [{2, 3}] * 3


def test_an_event_loop_runs_on_while_a_step_waits(fleet: Any) -> None:
    run = paraft.init(fleet)
    m = models.model("mlp")
    o = models.optimizer("sgd", m)

    def step() -> None:
        models.loss(m, next(models.batches("mlp", 0, 1))).backward()
        o.step()
        o.zero_grad()

    async def train() -> int:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(beat())
        await asyncio.to_thread(run.prepare, m, o)  # waits for servers
        before = beats
        for _ in range(20):
            await asyncio.to_thread(step)
        other.cancel()
        return beats - before

    assert asyncio.run(train()) > 20
    assert run.step == 20
    step()  # by this thread again
    run.finish()


@pytest.fixture
def notebook() -> Iterator[Any]:
    """``notebook(code)`` runs a cell in a kernel of Jupyter's, and gives what it printed or raised."""
    jupyter = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    manager, client = jupyter.manager.start_new_kernel(kernel_name="python3")

    def cell(code: str, interrupt_at: str = "") -> str:
        said: list[str] = []
        client.execute(code)
        until = time.monotonic() + 120
        while time.monotonic() < until:
            message = client.get_iopub_msg(timeout=120)
            content = message["content"]
            if message["msg_type"] == "stream":
                said.append(content["text"])
                if interrupt_at and interrupt_at in content["text"]:
                    time.sleep(0.3)  # into the wait
                    manager.interrupt_kernel()
            elif message["msg_type"] == "error":
                said.append(f"{content['ename']}: {content['evalue']}")
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return "".join(said)
        pytest.fail(f"the cell did not end\n{''.join(said)}")

    yield cell
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_notebook_trains_interrupts_and_goes_on(notebook: Any) -> None:
    setup = """
import paraft.torch, torch
from torch import nn
fleet = paraft.local(servers=1)
run = paraft.init(fleet)
model, optimizer = nn.Linear(4, 2), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model, optimizer)
def step():
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
print("at", run.step)
"""
    assert "at 1" in notebook(setup)
    waits = """
other = paraft.local(servers=1)
late = paraft.init(other, workers=2)       # the second never comes
m = nn.Linear(4, 2)
o = torch.optim.SGD(m.parameters(), lr=0.1)
print("waiting", flush=True)
late.prepare(m, o)
"""
    assert "KeyboardInterrupt" in notebook(waits, interrupt_at="waiting")
    # A cell that is run twice says what is in the way, and nothing is lost.
    assert "MisuseError: this run has its model already" in notebook("run.prepare(model, optimizer)")
    assert "at 3" in notebook("step(); step(); print('at', run.step)")
    assert notebook("run.finish(); fleet.close(); other.close(); print('done')") == "done\n"
