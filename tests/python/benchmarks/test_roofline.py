from __future__ import annotations

import pytest
from virtual_clock.roofline import Link, Roofline
from virtual_clock.trace import Op

ROOFLINE = Roofline({"bfloat16": 100.0}, 0.5, 10.0, 0.8, launch_s=1.0)


@pytest.mark.parametrize(
    ("flops", "nbytes", "seconds"),
    [
        (0, 0, 1.0),
        (100, 0, 3.0),  # 100 / (100 × 0.5)
        (0, 40, 6.0),  # 40 / (10 × 0.8)
        (100, 40, 6.0),  # the longer of both
        (500, 40, 11.0),
    ],
)
def test_seconds(flops: int, nbytes: int, seconds: float) -> None:
    assert ROOFLINE.seconds(Op(0, 0, flops, nbytes, "bfloat16")) == pytest.approx(seconds)


def test_an_unknown_dtype_is_not_guessed() -> None:
    with pytest.raises(KeyError):
        ROOFLINE.seconds(Op(0, 0, 1, 0, "float64"))


def test_link() -> None:
    assert Link(10.0, copy_s=0.5).seconds(20) == 2.5
