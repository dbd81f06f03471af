"""A recorded trace against the same model run for real."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from virtual_clock import trace as events  # noqa: E402
from virtual_clock.record import Recipe, record  # noqa: E402

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "use_cache": False}


def config() -> Any:
    return transformers.GPT2Config(**SMALL, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def saved_by_a_real_run(batch: int, sequence: int) -> list[tuple[int, ...]]:
    """(storage bytes, offset, sizes and strides) of every saved tensor that is no weight."""
    model = transformers.AutoModelForCausalLM.from_config(
        config(), attn_implementation="sdpa", dtype=torch.bfloat16
    )
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            view = (*tensor.size(), *tensor.stride())
            saved.append((storage.nbytes(), tensor.storage_offset(), *view))
        return tensor

    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens)
    return saved


def test_what_is_saved_is_what_a_real_run_saves() -> None:
    trace = record(Recipe("small", config, batch=2, sequence=16, blocks="transformer.h"))
    recorded = []
    for ticket in trace.tickets:
        view = trace.views[ticket.view]
        nbytes = trace.storages[ticket.storage]
        recorded.append((nbytes, view.storage_offset, *view.sizes, *view.strides))
    assert recorded == saved_by_a_real_run(2, 16)
    assert trace.weight_saves > 0


def test_operations_and_groups() -> None:
    trace = record(Recipe("small", config, batch=2, sequence=16, blocks="transformer.h"))
    kinds = [event.kind for event in trace.events]
    assert kinds.count(events.BEGIN_GROUP) == kinds.count(events.END_GROUP) == 2
    assert kinds.count(events.UNPACK) == kinds.count(events.DROP) == len(trace.tickets)
    # The first projection of a block: 2 × 16 tokens, 32 features in, 96 out.
    names = [trace.names[op.name] for op in trace.ops]
    first = trace.ops[names.index("addmm")]
    assert trace.names[first.module] == "transformer.h.0.attn.c_attn"
    assert first.flops == 2 * 32 * 32 * 96
    # Two products of 16 × 16 and 32 for each of two sequences, causal: half of it.
    attention = trace.ops[names.index("_scaled_dot_product_flash_attention_for_cpu")]
    assert attention.flops == 2 * 2 * (2 * 16 * 16 * 32) // 2
    assert first.nbytes == 2 * (96 + 32 * 32 + 32 * 96 + 32 * 96)


def test_recording_twice_gives_the_same() -> None:
    recipe = Recipe("small", config, batch=2, sequence=16, blocks="transformer.h")
    assert record(recipe) == record(recipe)
