"""Training a transformer on processes that hold a part of it each, in PyTorch, for `paraft bench pipeline`: cut in stages by
torch.distributed.pipelining (gpipe, 1f1b), its parameters sharded by FSDP2 (fsdp), or one process with all of it (whole). On the CPU, gloo,
one thread a process, SGD. A step is forward, loss, backward and the update.

    cat torch_models.py torch_pipeline.py | python - WAY STAGES MICRO_BATCHES LAYERS WIDTH CONTEXT BATCH STEPS

prints samples a second, without the first two steps, and the most anonymous memory that a process had, as JSON. Where the model is cut its head has a
weight of its own, since torch's stages share none.
"""
import os
import socket

import torch.distributed as dist


class Stage(nn.Module):
    """Some of the blocks, with what is before the first and behind the last."""

    def __init__(self, whole, layers, first, last):
        super().__init__()
        self.blocks = nn.ModuleList(whole.blocks[i] for i in layers)
        self.before = nn.ModuleList([whole.wte, whole.wpe] if first else [])
        self.behind = nn.ModuleList([whole.ln_f, nn.Linear(whole.wte.weight.shape[1], 256, bias=False)] if last else [])

    def forward(self, x):
        if len(self.before):
            wte, wpe = self.before
            x = wte(x) + wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        if len(self.behind):
            norm, head = self.behind
            x = head(norm(x)).flatten(0, 1)
        return x


def loss_of(logits, tokens):
    return F.cross_entropy(logits, tokens.flatten())


def anonymous(pid):
    try:
        with open(f"/proc/{pid}/status") as status:
            return max((int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")), default=0)
    except OSError:
        return 0


def rank_of(way, rank, ranks, address, shape, report):
    micro, layers, width, context, batch, steps = shape
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer(context, 256, layers, width // 64, width)
    if way != "whole":
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    x, y = torch.randint(256, (batch, context)), torch.randint(256, (batch, context))
    if way in ("gpipe", "1f1b"):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        of = [i * layers // ranks for i in range(ranks + 1)]
        part = Stage(model, range(of[rank], of[rank + 1]), rank == 0, rank + 1 == ranks)
        del model
        stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
        schedule = (ScheduleGPipe if way == "gpipe" else Schedule1F1B)(stage, micro, loss_fn=loss_of)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.01)

        def step():
            optimizer.zero_grad(set_to_none=True)
            given = (x,) if rank == 0 else ()
            if rank + 1 == ranks:
                schedule.step(*given, target=y, losses=[])
            else:
                schedule.step(*given)
            optimizer.step()
    else:
        if way == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (ranks,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss_of(model(x), y).backward()
            optimizer.step()

    step(), step()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    report.put(batch * steps / (time.perf_counter() - began))
    if way != "whole":
        dist.barrier()
        dist.destroy_process_group()


def main():
    way, ranks, *shape = sys.argv[1], *map(int, sys.argv[2:])
    ranks = 1 if way == "whole" else ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    # Forked: from `python -` no process can import this again.
    context = torch.multiprocessing.get_context("fork")
    report, peak = context.Queue(), 0
    processes = [context.Process(target=rank_of, args=(way, r, ranks, address, shape, report)) for r in range(ranks)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        peak = max([peak, *(anonymous(process.pid) for process in processes)])
        time.sleep(0.002)
    if any(process.exitcode for process in processes):
        sys.exit(f"a process of {way} has failed")
    print(json.dumps([min(report.get() for _ in processes), peak]))


if __name__ == "__main__":
    main()
