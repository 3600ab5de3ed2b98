"""One training step (forward, loss, backward) of the models of `paraft bench gpu`, in PyTorch.

    python torch_step.py MODEL BATCH PRECISION STEPS eager|compile

prints the seconds of each of STEPS steps as a JSON list. As in Paraft's steps the batch comes from pinned memory and the loss is read;
there is no optimizer, which is the servers' work.
"""
import json
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = self.qkv(self.ln_1(x)).reshape(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, time, vocab, layers, heads, width):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight).flatten(0, 1)


def mlp(inputs, width, classes):
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


def convnet():
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(7 * 7 * 32, 10))


def main():
    name, batch, precision, steps, how = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if name == "transformer":
        model, time_steps, vocab = Transformer(1024, 50257, 12, 12, 768), 1024, 50257
        x = torch.randint(vocab, (batch, time_steps)).pin_memory()
        y = torch.randint(vocab, (batch * time_steps,)).pin_memory()
    else:
        model = mlp(784, 4096, 10) if name == "mlp" else convnet()
        x, y = torch.rand(batch, 784).pin_memory(), torch.randint(10, (batch,)).pin_memory()
    model = model.cuda()
    run = torch.compile(model) if how == "compile" else model
    half = {"bf16": torch.bfloat16, "f16": torch.float16}.get(precision)

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=half, enabled=half is not None):
            loss = F.cross_entropy(run(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        loss.backward()
        torch.cuda.synchronize()
        return loss.item()

    for _ in range(10):
        step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
