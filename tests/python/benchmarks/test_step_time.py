from __future__ import annotations

import json
from pathlib import Path

import step_time


def test_smoke(tmp_path: Path) -> None:
    step_time.main(["--smoke", "--json", str(tmp_path / "out.json")])
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["parameters"]["roofline"]["launch_s"] == 4e-6
    rows = {row["schedule"]: row for row in content["results"]}
    none_s = rows["no offload"]["step_s"]
    assert all(row["step_s"] >= none_s for row in rows.values())
    assert rows["naive, by storage"]["d2h_bytes"] < rows["naive, by tensor"]["d2h_bytes"]
    ebbtide = rows["Ebbtide"]
    assert ebbtide["d2h_bytes"] > 0
    optimum = ebbtide["optimum"]
    assert optimum["limit_bytes"] == ebbtide["peak_bytes"]
    assert optimum["at_least_s"] <= optimum["at_most_s"]
    assert optimum["at_least_s"] <= ebbtide["step_s"]
