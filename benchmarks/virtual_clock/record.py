"""Records the traces of real models: shapes alone decide, so no memory is taken and nothing is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from virtual_clock import trace as events
from virtual_clock.trace import Event, Op, Ticket, Trace, View

aten = torch.ops.aten

# No kernel runs.
_NO_KERNEL = frozenset(
    {
        aten._unsafe_view.default,
        aten.alias.default,
        aten.detach.default,
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.lift_fresh.default,
        torch.ops.prim.device.default,
    }
)

# Reads as much as it writes, not the whole table.
_LOOK_UP = frozenset({aten.embedding.default, aten.index.Tensor, aten.gather.default})


@dataclass(frozen=True)
class Recipe:
    """A model and its input; ``blocks`` names the list of repeated blocks, whose runs are groups."""

    model: str
    config: Callable[[], Any]
    batch: int
    sequence: int
    blocks: str
    checkpointing: bool = False


def _gpt2() -> Any:
    # Without dropout, as most train today; on CPU tensors it would save another mask than on an accelerator.
    return transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)


def _llama_8b() -> Any:
    return transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )


RECIPES = {
    "gpt2": Recipe("GPT-2 124M", _gpt2, batch=8, sequence=1024, blocks="transformer.h"),
    "llama-8b": Recipe("Llama 8B", _llama_8b, batch=1, sequence=8192, blocks="model.layers"),
    "llama-8b-checkpointed": Recipe(
        "Llama 8B, blocks checkpointed", _llama_8b, 1, 8192, "model.layers", checkpointing=True
    ),
}


def record(recipe: Recipe) -> Trace:
    """The trace of one forward and backward in bfloat16, after one that brings the gradients into being."""
    settings = {
        "batch": recipe.batch,
        "sequence": recipe.sequence,
        "dtype": "bfloat16",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    with _bfloat16(), _no_mask(), FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.AutoModelForCausalLM.from_config(
            recipe.config(), attn_implementation="sdpa"
        )
        model.train()
        if recipe.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        tokens = torch.zeros(recipe.batch, recipe.sequence, dtype=torch.long)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        recorder = Recorder(Trace(recipe.model, settings), model)
        return recorder.step(
            lambda: model(input_ids=tokens, labels=tokens).loss, model.get_submodule(recipe.blocks)
        )


@contextlib.contextmanager
def _bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _no_mask() -> Iterator[None]:
    """Full sequences: attention is causal without a mask, which transformers cannot tell from shapes."""
    from transformers.models.gpt2 import modeling_gpt2
    from transformers.models.llama import modeling_llama

    with contextlib.ExitStack() as stack:
        for module in (modeling_gpt2, modeling_llama):
            stack.enter_context(mock.patch.object(module, "create_causal_mask", return_value=None))
        yield


class _Gone:
    """Whether a storage is gone; while this is held no other storage has its identity."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._pointer = storage._weak_ref()

    def __call__(self) -> bool:
        return torch.UntypedStorage._expired(self._pointer)

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._pointer)


class _Packed:
    def __init__(self, recorder: Recorder, ticket: int, tensor: torch.Tensor) -> None:
        self._recorder = recorder
        self.ticket = ticket
        self.like = (tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
        self.nbytes = tensor.untyped_storage().nbytes()
        self.storage_offset = tensor.storage_offset()

    def unpack(self) -> torch.Tensor:
        sizes, strides, dtype, device = self.like
        with self._recorder.paused():
            base = torch.empty(self.nbytes // dtype.itemsize, dtype=dtype, device=device)
            return base.as_strided(sizes, strides, self.storage_offset)

    def __del__(self) -> None:
        self._recorder.note(events.DROP, self.ticket)


class Recorder(TorchDispatchMode):
    """Notes the operations under it, what they allocate and when that is let go.

    Nothing is held for autograd: what it saves is let go of as an offloader does, and made anew in backward.
    """

    def __init__(self, trace: Trace, model: torch.nn.Module) -> None:
        super().__init__()
        self.trace = trace
        self._model = model
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self._weights |= {b.untyped_storage()._cdata for b in model.buffers()}
        self._names: dict[str, int] = {}
        self._views: dict[View, int] = {}
        self._modules: list[str] = [""]
        self._alive: dict[int, tuple[int, _Gone]] = {}
        self._unpacked: list[tuple[int, _Gone]] = []
        self._recording = False
        self._paused = False

    # --- the step

    def step(self, forward: Callable[[], torch.Tensor], blocks: torch.nn.Module) -> Trace:
        hooks = self._module_hooks(blocks)
        try:
            with saved_tensors_hooks(self._pack, self._unpack), self:
                self._recording = True
                loss = forward()
                self._look()
                self.note(events.BACKWARD, 0)
                self._modules = ["backward"]
                loss.backward()
                del loss
                self._look()
                for number, _ in self._alive.values():  # the model's inputs
                    self.note(events.LET_GO, number)
                self._recording = False
        finally:
            for hook in hooks:
                hook.remove()
        self._keep_saved()
        self.trace.check()
        return self.trace

    def _module_hooks(self, blocks: torch.nn.Module) -> list[Any]:
        hooks = []
        names = {module: name for name, module in self._model.named_modules()}
        grouped = set(blocks.children())

        def enter(module: torch.nn.Module, *_: Any) -> None:
            self._modules.append(names[module])
            if module in grouped:
                self.note(events.BEGIN_GROUP, self._name(names[module]))

        def leave(module: torch.nn.Module, *_: Any) -> None:
            self._look()
            self._modules.pop()
            if module in grouped:
                self.note(events.END_GROUP, self._name(names[module]))

        for module in names:
            hooks.append(module.register_forward_pre_hook(enter))
            hooks.append(module.register_forward_hook(leave))
        return hooks

    def note(self, kind: str, index: int) -> None:
        if self._recording:
            self.trace.events.append(Event(kind, index))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self._recording:
            return func(*args, **kwargs)
        self._look()
        out = func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        outputs = _tensors(out)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._alive:
                self._born(storage)
        if not func.is_view and func not in _NO_KERNEL:
            self._op(func, args, kwargs, out, inputs, outputs)
        return out

    def _op(
        self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Any], outputs: list[Any]
    ) -> None:
        flops = _flops(func, args, kwargs, out)
        dtype = str(inputs[0].dtype if inputs else outputs[0].dtype).removeprefix("torch.")
        name = self._name(func.name().removeprefix("aten::"))
        module = self._name(self._modules[-1])
        written = sum(_extent_bytes(t) for t in outputs)
        read = written if func in _LOOK_UP else sum(_extent_bytes(t) for t in inputs)
        self.note(events.OP, len(self.trace.ops))
        self.trace.ops.append(Op(name, module, flops, read + written, dtype))

    def _born(self, storage: torch.UntypedStorage) -> int:
        number = len(self.trace.storages)
        self.trace.storages.append(storage.nbytes())
        self._alive[storage._cdata] = (number, _Gone(storage))
        self.note(events.BORN, number)
        return number

    def _look(self) -> None:
        """Notes what is gone since."""
        gone = [key for key, (_, is_gone) in self._alive.items() if is_gone()]
        for key in gone:
            self.note(events.LET_GO, self._alive.pop(key)[0])
        for ticket, is_gone in self._unpacked:
            if is_gone():
                self.note(events.UNUSED, ticket)
        self._unpacked = [unpacked for unpacked in self._unpacked if not unpacked[1]()]

    def _name(self, name: str) -> int:
        number = self._names.setdefault(name, len(self._names))
        if number == len(self.trace.names):
            self.trace.names.append(name)
        return number

    # --- autograd's hooks

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Packed:
        storage = tensor.untyped_storage()
        if storage._cdata in self._weights:
            self.trace.weight_saves += 1
            return tensor.detach()
        self._look()
        alive = self._alive.get(storage._cdata)
        number = alive[0] if alive is not None else self._born(storage)
        view = View(
            tensor.storage_offset(), tensor.itemsize, tuple(tensor.size()), tuple(tensor.stride())
        )
        if view not in self._views:
            self._views[view] = len(self._views)
            self.trace.views.append(view)
        ticket = len(self.trace.tickets)
        self.trace.tickets.append(Ticket(number, self._views[view], tensor._version))
        self.note(events.SAVE, ticket)
        return _Packed(self, ticket, tensor)

    def _unpack(self, packed: torch.Tensor | _Packed) -> torch.Tensor:
        if not isinstance(packed, _Packed):
            return packed
        self._look()
        tensor = packed.unpack()
        self.note(events.UNPACK, packed.ticket)
        self._unpacked.append((packed.ticket, _Gone(tensor.untyped_storage())))
        return tensor

    def _keep_saved(self) -> None:
        """Storages that nobody saved are not of interest."""
        trace = self.trace
        saved = sorted({ticket.storage for ticket in trace.tickets})
        number = {old: new for new, old in enumerate(saved)}
        trace.storages = [trace.storages[old] for old in saved]
        trace.tickets = [t._replace(storage=number[t.storage]) for t in trace.tickets]
        of_storages = {events.BORN, events.LET_GO}
        trace.events = [
            Event(kind, number[index]) if kind in of_storages else Event(kind, index)
            for kind, index in trace.events
            if kind not in of_storages or index in number
        ]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _extent_bytes(tensor: torch.Tensor) -> int:
    """What a kernel reads of it: an expanded dimension once."""
    elements = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        elements *= size if stride != 0 else min(size, 1)
    return elements * tensor.itemsize


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """As torch.utils.flop_counter; causal attention is half of it, which is what its kernels do."""
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return sdpa_flop(*(t.shape for t in args[:3])) // (2 if _causal(args, 4, kwargs) else 1)
    if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        shapes = [t.shape for t in args[:4]]
        return sdpa_backward_flop(*shapes) // (2 if _causal(args, 7, kwargs) else 1)
    if func.overloadpacket in flop_registry:
        return int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
    return 0


def _causal(args: Any, place: int, kwargs: Any) -> bool:
    return bool(args[place] if len(args) > place else kwargs.get("is_causal", False))
