"""``ebbtide demo --framework mindspore``: equal results, and bytes that really moved."""

from __future__ import annotations

import json

import pytest

from ebbtide.cli import main


def test_demo_trains_equally_in_both_modes(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EBBTIDE_KEEP_LAST_BYTES", "0")
    monkeypatch.setenv("EBBTIDE_ALLOW_TMPFS", "1")
    output = tmp_path / "out.json"
    sizes = "--steps 2 --layers 2 --width 128 --sequence 64 --batch 4 --threads 1".split()
    arguments = ["demo", "--framework", "mindspore", *sizes]
    assert main([*arguments, "--to", str(tmp_path), "--json", str(output)]) == 0

    written = json.loads(output.read_text(encoding="utf-8"))
    assert written["equal"] is True
    plain, tide = (written["modes"][mode] for mode in ("plain", "ebbtide"))
    assert tide["loss_bits"] == plain["loss_bits"]
    assert tide["checksum"] == plain["checksum"]
    assert len(set(plain["losses"])) == 2
    assert tide["traffic"]["saved_bytes"] == plain["traffic"]["saved_bytes"]
    moved = tide["traffic"]
    assert 0 < moved["moved_in_bytes"] <= moved["moved_out_bytes"] <= moved["unique_bytes"]
    assert moved["unique_bytes"] < moved["saved_bytes"]

    captured = capsys.readouterr()
    assert "equal, bit for bit" in captured.out
    assert "mindspore on the CPU" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("mode", ["save_on_cpu"])
def test_modes_that_only_torch_has_are_refused(capsys, mode):
    assert main(["demo", "--framework", "mindspore", "--modes", mode]) == 2
    assert "mindspore has no mode" in capsys.readouterr().err
