"""Writes what PyTorch computes for small models, for the tests in worker/models/tests/golden.rs.

    python tools/golden/models.py [folder]

needs PyTorch (CPU is enough; written with 2.15) and no data. Weights and inputs come from a small generator
that the tests repeat, so a file holds results only: the loss, all gradients and the running statistics of one
training step, and the loss and accuracy in evaluation mode after it. PyTorch computes in double precision;
results are stored as f32, eight hex digits each (the bits, most significant first).
"""
import json
import os
import struct
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

OUT = sys.argv[1] if len(sys.argv) > 1 else os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "..", "worker", "models", "tests", "golden")


class Stream:
    """Numbers in -1..1 with 24 bits each: exact in f32, and the same in every language."""

    def __init__(self, seed):
        self.state = seed

    def fill(self, shape, scale, shift):
        count = 1
        for d in shape:
            count *= d
        values = []
        for _ in range(count):
            self.state = (self.state * 1664525 + 1013904223) % 2**32
            values.append(((self.state >> 8) / 2**23 - 1.0) * scale + shift)
        # The tests compute in f32: round as they do. Scales and shifts are powers of two, so this is exact
        # or one rounding.
        return torch.tensor(values, dtype=torch.float32).reshape(shape).double()


def widths(*sizes, last_relu=False):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


def convnet(side, classes):
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear((side // 4)**2 * 32, classes))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict(dict(c_attn=nn.Linear(width, 3 * width), c_proj=nn.Linear(width, width)))
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(width, 4 * width), c_proj=nn.Linear(4 * width, width)))

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = self.attn["c_attn"](self.ln_1(x)).reshape(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """nanoGPT's, without dropout; the head shares the token embedding's weight."""

    def __init__(self, time, vocab, layers, heads, width):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(vocab, width), wpe=nn.Embedding(time, width),
            h=nn.ModuleList(Block(width, heads) for _ in range(layers)), ln_f=nn.LayerNorm(width)))

    def forward(self, tokens):
        t = self.transformer
        x = t["wte"](tokens) + t["wpe"](torch.arange(tokens.shape[1]))
        for block in t["h"]:
            x = block(x)
        return F.linear(t["ln_f"](x), t["wte"].weight)


def hexed(t):
    return "".join(struct.pack(">f", v).hex() for v in t.detach().flatten().tolist())


def scale_and_shift(model, name):
    """Weights small, the norms' gains of both signs, the running variances positive."""
    if isinstance(model, Transformer):
        return (0.25, 1.0) if ".ln_" in name and name.endswith("weight") else (0.25, 0.0)
    module = model if "." not in name else model[int(name.split(".")[0])]
    if name.endswith("running_var"):
        return 0.5, 1.0
    if isinstance(module, nn.BatchNorm2d) and name.endswith("weight"):
        return 2.0, 0.0
    return 0.25, 0.0


def case(name, config, model, inputs, classes, n, seed):
    model = model.double()
    stream = Stream(seed)
    params = dict(model.named_parameters())
    buffers = {k: v for k, v in model.named_buffers() if not k.endswith("num_batches_tracked")}
    tensors = []
    with torch.no_grad():
        for key, t in list(params.items()) + list(buffers.items()):
            scale, shift = scale_and_shift(model, key)
            t.copy_(stream.fill(t.shape, scale, shift))
            tensors.append(dict(name=key, shape=list(t.shape), scale=scale, shift=shift))
    if isinstance(model, Transformer):
        # `inputs` tokens a sample, each below `classes`.
        x = (torch.arange(n * inputs) * 5 % classes).reshape(n, inputs)
        y = torch.arange(n * inputs) * 7 % classes
    else:
        x = stream.fill((n, inputs), 0.5, 0.5)
        y = torch.arange(n) * 7 % classes if classes else None

    def loss():
        out = model(x)
        out = out.reshape(-1, out.shape[-1])
        return out, (F.cross_entropy(out, y) if classes else F.mse_loss(out, x))

    model.train()
    _, train = loss()
    train.backward()
    model.eval()
    out, held_out = loss()
    body = dict(
        torch=torch.__version__, config=config, inputs=inputs, classes=classes, n=n, seed=seed,
        tensors=tensors, loss=train.item(), grads={k: hexed(v.grad) for k, v in params.items()},
        buffers={k: hexed(v) for k, v in buffers.items()}, eval_loss=held_out.item(),
        eval_correct=(out.argmax(1) == y).sum().item() if classes else 0)
    path = os.path.join(OUT, name + ".json")
    with open(path, "w") as f:
        json.dump(body, f, indent=1)
        f.write("\n")
    print(path, os.path.getsize(path), "bytes, loss", train.item())


def main():
    os.makedirs(OUT, exist_ok=True)
    torch.set_num_threads(1)
    case("linear", dict(kind="logistic-regression"), nn.Linear(12, 4), 12, 4, 9, 1)
    case("mlp", dict(kind="mlp", hidden=[9, 7]), widths(12, 9, 7, 4), 12, 4, 19, 2)
    case("autoencoder", dict(kind="autoencoder", hidden=[6, 5, 6]),
         widths(10, 6, 5, 6, 10, last_relu=True), 10, None, 8, 3)
    case("convnet", dict(kind="convnet"), convnet(8, 5), 64, 5, 21, 4)
    config = dict(kind="transformer", layers=2, heads=2, width=32)
    case("transformer", config, Transformer(5, 11, 2, 2, 32), 5, 11, 3, 5)


if __name__ == "__main__":
    main()
