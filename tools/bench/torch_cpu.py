"""One training step (forward, loss, backward) of the models of `paraft bench kernels`, in PyTorch on one thread of the CPU.

    cat torch_models.py torch_cpu.py | python - MODEL BATCH MILLIS

prints what instructions PyTorch uses, and the seconds of each step in MILLIS milliseconds as a JSON list. The loss is read; there is no
optimizer, which is the servers' work.
"""


def main():
    name, batch, millis = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    x, y = torch.rand(batch, 784), torch.randint(10, (batch,))
    if name == "transformer":
        model = Transformer(64, 256, 4, 4, 128)
        x, y = torch.randint(256, (batch, 64)), torch.randint(256, (batch * 64,))
    elif name == "autoencoder":
        model, y = mlp(784, 128, 128, 128, 784), x
    else:
        model = mlp(784, 256, 128, 10) if name == "mlp" else convnet()
    loss_of = F.mse_loss if name == "autoencoder" else F.cross_entropy

    def step():
        model.zero_grad(set_to_none=True)
        loss = loss_of(model(x), y)
        loss.backward()
        return loss.item()

    for _ in range(5):
        step()
    seconds, end = [], time.perf_counter() + millis / 1e3
    while time.perf_counter() < end or len(seconds) < 5:
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    print(torch.backends.cpu.get_cpu_capability())
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
