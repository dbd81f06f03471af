"""What the error of a tensor that was changed in place says: which one, where it was saved, and what to do."""

from __future__ import annotations

import re

import pytest
from support import FRAMEWORK, assert_at_rest

from ebbtide.errors import InplaceModificationError

TYPE = {"torch": "FloatTensor", "mindspore": "Float32"}[FRAMEWORK]


def text_of(backend, tide, group=None, views=()):
    """Of the error in backward, where a float32 tensor of 6 by 4 was written to after its forward. Saved last is a chain
    of ``views`` of it."""
    held = []

    def program(anchor):
        held[:] = [backend.tensor(6, 4)]
        held[1:] = [backend.view(held[0], *views)] if views else []
        for tensor in held:
            anchor = backend.save(anchor, [tensor])
        return anchor

    def in_group(anchor):
        with tide.group(group):
            return program(anchor)

    forward = backend.forward(program if group is None else in_group, [backend.leaf(2)], tide)
    backend.write(held[0])
    held.clear()
    with pytest.raises(InplaceModificationError) as caught:
        forward.gradients()
    text = str(caught.value)
    caught = forward = None
    assert_at_rest(tide)
    return text


def assert_says(text, sizes, place):
    assert text.startswith("[unpack] "), text
    assert "modified by an inplace operation" in text, text
    assert re.search(rf"{TYPE}.*{re.escape(str(sizes))}\]?, {re.escape(place)}", text), text
    versions = re.search(r"version (?:is )?(\d+)\b.*expected version (\d+)", text)
    assert versions and int(versions[1]) == int(versions[2]) + 1, text
    assert "write to a copy of it, or only after backward" in text, text


def test_in_a_group(backend):
    text = text_of(backend, backend.offload(), "encoder.3")
    assert_says(text, [6, 4], "saved in group 'encoder.3'")
    assert "on_inplace='saved' takes the copy" in text


def test_outside_of_groups(backend):
    assert_says(text_of(backend, backend.offload()), [6, 4], "saved outside of groups")


def test_a_view_has_its_own_shape(backend):
    text = text_of(backend, backend.offload(), views=[("narrow", 0, 1, 3)])
    assert_says(text, [3, 4], "saved outside of groups")


def test_a_view_of_another_dtype_has_its_own(backend):
    """Both share one in-place counter, and so one witness, which is of the first."""
    other = {"torch": "IntTensor [6, 4]", "mindspore": "Int32 Tensor of shape [6, 4]"}[FRAMEWORK]
    assert other in text_of(backend, backend.offload(), views=[("dtype", "int32")])


def test_what_stayed_on_the_device(backend):
    text = text_of(backend, backend.offload(min_bytes="1MiB"))
    assert_says(text, [6, 4], "which stayed on the device")


def test_without_a_complete_copy(backend):
    text = text_of(backend, backend.offload(keep_last_bytes="1MiB", on_inplace="saved"))
    assert_says(text, [6, 4], "saved outside of groups")
    assert "on_inplace='saved' had no copy that was complete before the write" in text


@pytest.mark.skipif(FRAMEWORK != "torch", reason="MindSpore has no such mode")
def test_it_names_what_shows_the_operation(backend):
    text = text_of(backend, backend.offload())
    assert "torch.autograd.set_detect_anomaly(True) shows the operation that saved it" in text
    assert "one of the variables needed for gradient computation has been modified" in text
