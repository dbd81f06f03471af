"""Sizes as people write them become bytes, and bytes become readable."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide import UsageError
from ebbtide.sizes import format_bytes, parse_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (0, 0),
        (123, 123),
        ("0", 0),
        ("123", 123),
        ("12 B", 12),
        (" 8GiB ", 8 * GIB),
        ("8gib", 8 * GIB),
        ("1.5 GB", 1_500_000_000),
        ("64k", 64 * KIB),
        ("64K", 64 * KIB),
        ("64Ki", 64 * KIB),
        ("64 KiB", 64 * KIB),
        ("64kB", 64_000),
        ("3M", 3 * MIB),
        ("3MB", 3_000_000),
        ("2T", 2 << 40),
        ("1PB", 10**15),
        ("1 EiB", 1 << 60),
        (".5KiB", 512),
        ("1e9", 10**9),
        ("1.5e3", 1500),
        ("0.3KiB", 307),  # 307.2
        (1e9, 10**9),
        ((1 << 63) - 1, (1 << 63) - 1),
    ],
)
def test_parse_bytes(value: object, nbytes: int) -> None:
    parsed = parse_bytes(value)
    assert parsed == nbytes and type(parsed) is int


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-1, "is negative"),
        ("-1", "is negative"),
        ("-5GiB", "is negative"),
        (-2.0, "is negative"),
        (True, "is no size"),
        (False, "is no size"),
        (None, "is no size"),
        (math.nan, "is no size"),
        (math.inf, "is no size"),
        (1.5, "is no size"),
        ("nan", "is no size"),
        ("inf", "is no size"),
        ("", "is no size"),
        ("GiB", "is no size"),
        ("8 gigs", "is no size"),
        ("8 Gi B", "is no size"),
        ("1,5 GB", "is no size"),
        ("1_000", "is no size"),
        ("0x10", "is no size"),
        ("--1", "is no size"),
        ("1e999", "is no size"),
        ("9" * 5000, "is no size"),
        ("٣", "is no size"),  # a digit, but not an ASCII one
        (b"8GiB", "is no size"),
        ([1], "is no size"),
        ("1.5", "no whole number of bytes"),
        ("0.5 B", "no whole number of bytes"),
        (1 << 63, "above 2**63 - 1"),
        ("8 EiB", "above 2**63 - 1"),
        ("1e99", "above 2**63 - 1"),
    ],
)
def test_parse_bytes_refuses(value: object, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(value, "OffloadConfig.max_host_bytes")
    text = str(caught.value)
    assert text.startswith("[OffloadConfig.max_host_bytes] ") and reason in text
    assert repr(value) in text or len(repr(value)) > 80
    assert "give" in text or "add a unit" in text
    assert len(text) < 400


def test_parse_bytes_takes_whatever_is_an_index() -> None:
    numpy = pytest.importorskip("numpy")
    assert parse_bytes(numpy.int64(5)) == 5
    with pytest.raises(UsageError):
        parse_bytes(numpy.array([1, 2]))
    with pytest.raises(UsageError):
        parse_bytes(numpy.bool_(True))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB - 1, "1.0 MiB"),
        (2 * GIB, "2.0 GiB"),
        ((1 << 63) - 1, "8.0 EiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, (1 << 63) - (1 << 59)))
def test_format_then_parse_is_near(nbytes: int) -> None:
    text = format_bytes(nbytes)
    parsed = parse_bytes(text)
    assert abs(parsed - nbytes) <= nbytes // 19  # half of a tenth, of at least 1.0
    assert format_bytes(parsed) == text


@given(st.integers(0, (1 << 63) - 1))
def test_whole_bytes_are_exact(nbytes: int) -> None:
    spellings: tuple[object, ...] = (nbytes, str(nbytes), f"{nbytes} B", f" {nbytes}b ")
    assert all(parse_bytes(spelling) == nbytes for spelling in spellings)


@given(
    st.decimals(0, 8000, places=3),
    st.sampled_from(list(enumerate("kmgtp", start=1))),
    st.sampled_from(["", " "]),
    st.booleans(),
)
def test_units_are_exact(number: object, unit: tuple[int, str], blank: str, upper: bool) -> None:
    power, letter = unit
    letter = letter.upper() if upper else letter
    thousandths = int(str(number).replace(".", ""))
    for suffix, base in (("", 1024), ("i", 1024), ("iB", 1024), ("B", 1000)):
        text = f"{number}{blank}{letter}{suffix}"
        if (expected := thousandths * base**power // 1000) < 1 << 63:
            assert parse_bytes(text) == expected


@given(st.text(max_size=20) | st.floats() | st.integers())
def test_parse_bytes_gives_bytes_or_a_usage_error(value: object) -> None:
    try:
        assert 0 <= parse_bytes(value) < 1 << 63
    except UsageError as error:
        assert str(error).startswith("[parse_bytes] ")
