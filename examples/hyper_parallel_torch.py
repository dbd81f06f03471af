"""A small decoder trained the way HyperParallel's users write it: layers wrapped, chained, and sharded outside.

python examples/hyper_parallel_torch.py                        # attention swapped, perceptrons recomputed
python examples/hyper_parallel_torch.py --plain                # the same losses, without
torchrun --nproc-per-node 2 examples/hyper_parallel_torch.py   # each rank keeps a shard of the weights

Activations go to host memory; with EBBTIDE_TO=disk to a file, which is what helps where tensors are on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from ebbtide.hyper_parallel import SwapManager, checkpoint_wrapper, report, swap_wrapper

VOCABULARY, LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = 512, 4, 256, 4, 256, 4


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, sequence, 3 * HEADS, width // HEADS)
        q, k, v = heads.transpose(1, 2).chunk(3, dim=1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate_and_up = nn.Linear(WIDTH, 8 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_and_up(self.norm(x)).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.perceptron = Perceptron()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, cos, sin)
        return x + self.perceptron(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        size = WIDTH // HEADS
        angles = torch.arange(SEQUENCE)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
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
    for first, second in zip(model.layers, model.layers[1:], strict=False):
        SwapManager().set_forward_prefetch_layer(first, second)


def shard(model: Decoder) -> None:
    """Outside of the wrappers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def peak_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def train(options: argparse.Namespace, rank: int) -> dict[str, object]:
    """Losses and final weights, as exact texts."""
    accelerator = torch.accelerator.current_accelerator() if "RANK" not in os.environ else None
    device = accelerator or torch.device("cpu")
    torch.manual_seed(0)
    model = Decoder().to(device)
    if not options.plain:
        swap(model, options.group_swap)
    if "RANK" in os.environ:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + rank)
    losses = []
    for step in range(options.steps):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).to(device)
        logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"rank {rank}, step {step}: loss {losses[-1]:.6f}")
    print(f"rank {rank}: peak memory {peak_bytes(device) / 2**20:.1f} MiB")
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    local = {name: getattr(w, "to_local", lambda w=w: w)() for name, w in weights.items()}
    sums = {name: w.double().cpu().sum().item().hex() for name, w in local.items()}
    return {"losses": [loss.hex() for loss in losses], "weights": sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without swap and recomputation")
    parser.add_argument("--group-swap", action="store_true", help="small tensors cross in packs")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", metavar="PATH", help="write losses and sums of the weights there")
    options = parser.parse_args()
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    found = train(options, rank)
    if options.json:
        with open(f"{options.json}.{rank}", "w") as file:
            json.dump(found, file)
    if not options.plain:
        print(report())
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
