"""A small decoder trained the way HyperParallel's users write it in MindSpore: cells wrapped and chained.

python examples/hyper_parallel_mindspore.py            # attention swapped, perceptrons recomputed
python examples/hyper_parallel_mindspore.py --plain    # the same losses, without

Activations go to host memory; with EBBTIDE_TO=disk to a file, which is what helps where tensors are on the CPU.
"""

from __future__ import annotations

import argparse
import json
import resource

import mindspore as ms
import numpy as np
from mindspore import mint, nn, ops

from ebbtide.hyper_parallel import SwapManager, checkpoint_wrapper, report, swap_wrapper

VOCABULARY, LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = 512, 4, 256, 4, 256, 4


def rotated(x: ms.Tensor, cos: ms.Tensor, sin: ms.Tensor) -> ms.Tensor:
    first, second = mint.chunk(x, 2, dim=-1)
    return x * cos + mint.cat((-second, first), dim=-1) * sin


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,))
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH)
        self.out = nn.Dense(WIDTH, WIDTH)
        self.mask = ms.Tensor(np.triu(np.full((SEQUENCE, SEQUENCE), -1e9, np.float32), 1))

    def construct(self, x: ms.Tensor, cos: ms.Tensor, sin: ms.Tensor) -> ms.Tensor:
        batch, sequence, width = x.shape
        size = width // HEADS
        heads = self.qkv(self.norm(x)).view(batch, sequence, 3 * HEADS, size)
        q, k, v = mint.chunk(mint.transpose(heads, 1, 2), 3, dim=1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        scores = mint.matmul(q, mint.transpose(k, 2, 3)) / size**0.5 + self.mask
        mixed = mint.matmul(ops.softmax(scores, -1), v)
        return self.out(mint.transpose(mixed, 1, 2).reshape(x.shape))


class Perceptron(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,))
        self.gate_and_up = nn.Dense(WIDTH, 8 * WIDTH)
        self.down = nn.Dense(4 * WIDTH, WIDTH)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        gate, up = mint.chunk(self.gate_and_up(self.norm(x)), 2, dim=-1)
        return self.down(gate * mint.sigmoid(gate) * up)


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.perceptron = Perceptron()

    def construct(self, x: ms.Tensor, cos: ms.Tensor, sin: ms.Tensor) -> ms.Tensor:
        x = x + self.attention(x, cos, sin)
        return x + self.perceptron(x)


class Decoder(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.CellList([Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm((WIDTH,))
        self.head = nn.Dense(WIDTH, VOCABULARY, has_bias=False)
        size = WIDTH // HEADS
        angles = np.arange(SEQUENCE)[:, None] / 10000 ** (np.arange(0, size, 2) / size)
        angles = np.concatenate((angles, angles), axis=-1).astype(np.float32)
        self.cos, self.sin = ms.Tensor(np.cos(angles)), ms.Tensor(np.sin(angles))

    def construct(self, tokens: ms.Tensor) -> ms.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def swap(model: Decoder, group_swap: bool) -> None:
    """The steps that HyperParallel's users know."""
    for layer in model.layers:
        layer.attention = swap_wrapper(layer.attention, group_swap=group_swap)
        layer.perceptron = checkpoint_wrapper(
            layer.perceptron, swap_inputs=True, group_swap=group_swap
        )
    layers = list(model.layers)
    for first, second in zip(layers, layers[1:], strict=False):
        SwapManager().set_forward_prefetch_layer(first, second)


def train(options: argparse.Namespace) -> dict[str, object]:
    """Losses and final weights, as exact texts."""
    ms.set_seed(0)
    np.random.seed(0)
    model = Decoder()
    if not options.plain:
        swap(model, options.group_swap)
    optimizer = nn.SGD(model.trainable_params(), learning_rate=0.1)

    def loss_of(tokens: ms.Tensor, targets: ms.Tensor) -> ms.Tensor:
        logits = model(tokens)
        return ops.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))

    step_of = ms.value_and_grad(loss_of, None, optimizer.parameters)
    generator = np.random.default_rng(1)
    losses = []
    for step in range(options.steps):
        tokens = generator.integers(VOCABULARY, size=(BATCH, SEQUENCE + 1), dtype=np.int32)
        loss, gradients = step_of(ms.Tensor(tokens[:, :-1]), ms.Tensor(tokens[:, 1:]))
        optimizer(gradients)
        losses.append(float(loss.asnumpy()))
        print(f"step {step}: loss {losses[-1]:.6f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(f"peak memory {max(peak, ms.runtime.max_memory_allocated()) / 2**20:.1f} MiB")
    sums = {
        parameter.name: float(parameter.asnumpy().astype(np.float64).sum()).hex()
        for parameter in model.trainable_params()
    }
    return {"losses": [loss.hex() for loss in losses], "weights": sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without swap and recomputation")
    parser.add_argument("--group-swap", action="store_true", help="small tensors cross in packs")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", metavar="PATH", help="write losses and sums of the weights there")
    options = parser.parse_args()
    found = train(options)
    if options.json:
        with open(f"{options.json}.0", "w") as file:
            json.dump(found, file)
    if not options.plain:
        print(report())


if __name__ == "__main__":
    main()
