"""The README's example: a small network trained with its activations on disk."""

import torch

import ebbtide.torch as ebb

torch.manual_seed(0)
model = torch.nn.Sequential(
    *[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8)]
)
optimizer = torch.optim.AdamW(model.parameters())
batches = [(torch.randn(1024, 512), torch.randn(1024, 512)) for _ in range(3)]

# [readme]
tide = ebb.offload(model, keep_last_bytes="8MiB")

for x, y in batches:
    with tide:  # the one line
        loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print(tide.report())
# [readme]
