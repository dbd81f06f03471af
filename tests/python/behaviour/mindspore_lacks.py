"""What MindSpore's CPU backend cannot express, each with the reason that a skipped test prints."""

from __future__ import annotations

VIEWS = {
    "conj": "MindSpore has no lazy conjugate bit: conj() makes a copy",
    "neg": "MindSpore has no lazy negative bit: neg() makes a copy",
}

DTYPES: dict[str, str] = {
    "float8_e5m2fnuz": "MindSpore has no float8_e5m2fnuz",
}

OPS: dict[str, str] = {}

THINGS = {
    "kernels that save views": (
        "bits are right, but nothing is shared: MindSpore's CPU kernels save contiguous copies of views"
    ),
    "second derivatives of slices": (
        "MindSpore itself fails, without offload: 'SliceGrad's bprop not defined' and the like"
    ),
    "sparse tensors": "MindSpore's sparse tensors are pairs of dense ones",
    "nested tensors": "MindSpore has no nested tensors",
    "quantized tensors": "MindSpore has no quantized tensors in PyNative mode",
}

# Of the tests that use PyTorch's own objects.
TESTS = {
    "test_complex_gradients_through_conjugates": "MindSpore has no lazy conjugate bit",
    "test_attention_with_a_padded_mask": "MindSpore has no scaled_dot_product_attention on the CPU",
    "test_no_grad_and_eval_between_forward_and_backward": (
        "of modes of torch.nn modules; test_no_grad_between_forward_and_backward is about cells too"
    ),
    "test_a_forward_and_backward_inside_a_backward": (
        "MindSpore's recomputation has tests of its own, in tests/python/mindspore"
    ),
    "test_outputs_do_not_leak": (
        "marks PyTorch's graph nodes; tests/python/mindspore/test_outputs.py marks tensors"
    ),
    "test_a_saved_tensor_read_without_a_backward": (
        "MindSpore's graph nodes do not show what they saved"
    ),
    "test_a_read_tensor_saved_again_in_a_forward": (
        "MindSpore's graph nodes do not show what they saved"
    ),
    "test_requires_grad_is_leaf_and_grad_fn": (
        "MindSpore's tensors have no public requires_grad, is_leaf and grad_fn"
    ),
    "test_a_result_saved_by_its_own_node": "MindSpore's graph nodes do not show what they saved",
    "test_create_graph_copies_nothing_twice": (
        "counts what PyTorch's formulas save of second derivatives"
    ),
}
