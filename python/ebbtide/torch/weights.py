"""Which saved tensors are weights: by type, by base, by the model's storages, and autocast's casts of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import Buffer, Parameter

from ebbtide.errors import UsageError

# Views that may lie between a parameter and its cast.
_VIEW_NODES = frozenset(
    {
        "AliasBackward0",
        "AsStridedBackward0",
        "DiagonalBackward0",
        "ExpandBackward0",
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "SplitBackward0",
        "SplitWithSizesBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "TBackward0",
        "TransposeBackward0",
        "UnbindBackward0",
        "UnfoldBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
_MAX_VIEWS = 4


def is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, (Parameter, Buffer))


def is_weight_cast(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a cast of a trainable parameter (or of a view of one), as autocast makes them.

    A cast of a frozen parameter has no graph and cannot be told from an activation.
    """
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    for _ in range(_MAX_VIEWS):
        node = node.next_functions[0][0]
        if node is None:
            return False
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            return is_weight(node.variable)
        if name not in _VIEW_NODES:
            return False
    return False


class ModelWeights:
    """Storages of a model's parameters and buffers, held weakly, by the number that is not issued again meanwhile.

    Reads from any thread see a whole walk."""

    def __init__(self, model: Any) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"[offload] model is a {type(model).__name__}: pass a torch.nn.Module, or leave it out"
            )
        self._model = model
        self.storages: dict[int, StorageWeakRef] = {}
        self.refresh()

    def refresh(self) -> None:
        if self._model is None:
            return
        storages: dict[int, StorageWeakRef] = {}
        for weights in (self._model.parameters(), self._model.buffers()):
            for weight in weights:
                storage = _storage(weight)
                if storage is not None and storage._cdata not in storages:
                    storages[storage._cdata] = StorageWeakRef(storage)
        self.storages = storages

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self.storages


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return None  # sparse, meta without storage, lazy parameters
