"""Blocks are found in models as people build and wrap them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from block_nets import LAYERS, Net, Other, names, numbered
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training import Block, make_model

from ebbtide.torch.blocks import repeated_blocks

# --- models of transformers


def transformer(kind: str) -> nn.Module:
    hf = pytest.importorskip("transformers")
    common = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    moe = {"num_local_experts": 2, "num_key_value_heads": 2}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 2}
    t5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    makers: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**{**common, **gpt2})),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**common)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**common)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**{**common, **t5})),
        "vit": lambda: hf.ViTModel(hf.ViTConfig(image_size=32, patch_size=16, **common)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**common, **moe)),
    }
    return makers[kind]()


@pytest.mark.parametrize(
    ("kind", "block", "expected"),
    [
        ("gpt2", "GPT2Block", numbered("transformer.h.")),
        ("llama", "LlamaDecoderLayer", numbered("model.layers.")),
        ("bert", "BertLayer", numbered("bert.encoder.layer.")),
        ("t5", "T5Block", numbered("encoder.block.") + numbered("decoder.block.")),
        ("vit", "ViTLayer", None),
        ("mixtral", "MixtralDecoderLayer", numbered("model.layers.")),
    ],
)
def test_models_of_transformers(kind: str, block: str, expected: list[str] | None) -> None:
    model = transformer(kind)
    found = repeated_blocks(model)
    assert [type(module).__name__ for _, module in found] == [block] * len(found)
    assert len(found) == (4 if kind == "t5" else 2)
    assert all(model.get_submodule(name) is module for name, module in found)
    if expected is not None:
        assert [name for name, _ in found] == expected


def test_a_model_of_transformers_inside_another_module() -> None:
    inner = transformer("gpt2")
    outer = nn.ModuleDict({"a": nn.Linear(2, 2), "b": inner})
    assert names(outer) == numbered("b.transformer.h.")
    pair = nn.ModuleList([inner, transformer("gpt2")])
    assert names(pair) == numbered("0.transformer.h.") + numbered("1.transformer.h.")


# --- names that a model declares


def test_declared_names_of_submodules_count_too() -> None:
    net = Net(Block(), Other(), Block(), Other())
    net._no_split_modules = ["Other"]
    assert names(net) == ["layers.1", "layers.3"]
    assert names(nn.Sequential(net, nn.ReLU())) == ["0.layers.1", "0.layers.3"]
    outer = nn.Sequential(net)
    outer._no_split_modules = ["Elsewhere"]
    assert names(outer) == ["0.layers.1", "0.layers.3"]


@pytest.mark.parametrize("declared", [None, [], set(), ["Absent"], "Absent", ["Linear"], ["Net"]])
def test_declared_names_without_repeated_modules(declared: Any) -> None:
    net = Net()
    net._no_split_modules = declared
    if declared == ["Linear"]:
        assert names(net)[:2] == ["layers.0.up", "layers.0.down"]
    else:
        assert names(net) == LAYERS


# --- hand-made models


def test_a_list_of_blocks() -> None:
    net = Net()
    found = repeated_blocks(net)
    assert [name for name, _ in found] == LAYERS
    assert [module for _, module in found] == list(net.layers)
    assert names(make_model(3)) == numbered("", 3)
    assert names(nn.ModuleDict({"x": Block(), "y": Block()})) == ["x", "y"]


def test_transformers_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64)
    assert names(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)) == numbered("layers.")
    both = nn.Transformer(32, 2, 2, 2, 64)
    assert names(both) == numbered("encoder.layers.") + numbered("decoder.layers.")


def test_classes_count_each_for_itself() -> None:
    net = Net(Block(), Other(), nn.Linear(32, 32), Block(), nn.Linear(32, 32))
    assert names(net) == ["layers.0", "layers.3"]
    assert names(Net(Block(), Other(), Other(), Block())) == numbered("layers.", 4)


def test_nested_lists() -> None:
    nested = nn.ModuleList([nn.ModuleList([Block(), Block()]) for _ in range(2)])
    assert names(nested) == numbered("0.") + numbered("1.")
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.ReLU(), make_model(2))
    assert names(stages) == numbered("0.") + numbered("2.")


def test_only_the_outermost() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Block(), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert names(Net(Holder(), Holder())) == numbered("layers.")
    assert names(nn.Sequential(nn.Linear(2, 2), Holder())) == numbered("1.inner.")


def test_sequentials_that_are_layers_themselves() -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)]
    assert names(nn.Sequential(*layers)) == numbered("", 3)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()),
        nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(3))),
        nn.LSTM(4, 4, 2),
        nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)]),
        nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())]),
        nn.ModuleList([nn.ModuleList(), nn.ModuleDict(), nn.Sequential(), nn.ModuleList()]),
        nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2)]),
        nn.Sequential(Block()),
        Block(),
        nn.Linear(4, 4),
    ],
    ids=lambda model: type(model).__name__,
)
def test_models_without_groups(model: nn.Module) -> None:
    assert repeated_blocks(model) == []


def test_absent_children() -> None:
    net = Net()
    net.register_module("absent", None)
    net.layers.register_module("absent", None)
    assert names(net) == LAYERS


def test_a_shared_module_is_listed_once() -> None:
    block = Block()
    assert names(Net(block, block)) == ["layers.0"]
    tied = nn.ModuleDict({"a": nn.ModuleList([block, Block()]), "b": nn.ModuleList([block, block])})
    assert names(tied) == numbered("a.")


def test_scripted_modules_take_no_hooks() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential()))
    assert names(nn.ModuleList([scripted, scripted])) == []


# --- wrapped


@pytest.mark.parametrize(
    "wrap",
    [
        checkpoint_wrapper,
        lambda block: torch.compile(block, backend="eager"),
        lambda block: torch.compile(checkpoint_wrapper(block), backend="eager"),
    ],
    ids=["checkpoint", "compile", "both"],
)
def test_wrapped_blocks(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = [wrap(Block()) for _ in range(2)]
    net = Net(Block(), *wrapped, wrap(nn.Linear(32, 32)), wrap(nn.Linear(32, 32)))
    found = repeated_blocks(net)
    assert [name for name, _ in found] == LAYERS
    assert [module for _, module in found] == [net.layers[0], *wrapped]
    net._no_split_modules = ["Block"]
    assert repeated_blocks(net) == found
    whole = wrap(net)
    assert repeated_blocks(whole) == found
    assert names(nn.ModuleDict({"net": whole})) == [f"net.{name}" for name in LAYERS]


def test_data_parallel() -> None:
    assert names(nn.DataParallel(Net())) == LAYERS


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_distributed_wrappers(one_rank: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    net = Net()
    assert names(nn.parallel.DistributedDataParallel(net)) == LAYERS
    for layer in net.layers[1:]:
        fully_shard(layer)
    fully_shard(net)
    assert type(net.layers[1]) is not Block
    assert names(net) == LAYERS
    net._no_split_modules = ["Block"]
    assert names(net) == LAYERS

    cpu = torch.device("cpu")
    wrapped = [FullyShardedDataParallel(Block(), device_id=cpu) for _ in range(2)]
    net = Net(*wrapped)
    assert [module for _, module in repeated_blocks(net)] == wrapped
    assert names(FullyShardedDataParallel(net, device_id=cpu)) == numbered("layers.")
