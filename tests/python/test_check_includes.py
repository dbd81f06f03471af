"""The include check finds what it is there to find, and passes what is allowed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "check_includes.py"


@pytest.fixture(scope="module")
def check_includes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_includes", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def header(*stems: str) -> str:
    return "".join(f'#include "ebbtide/{stem}.h"\n' for stem in stems)


@pytest.mark.parametrize(
    "files",
    [
        {"include/ebbtide/error.h": "#include <string>\n" + header("types")},
        {"include/ebbtide/plan.h": header("types", "byte_ranges", "storage_ref")},
        {"src/core/plan.cc": header("plan", "error")},
        {"src/core/engine_save.cc": '#include "core/engine_impl.h"\n' + header("engine", "window")},
        {"src/executor/host_executor.cc": header("host_executor", "engine", "host_pool")},
        {"bindings/module.cc": '#include "casters.h"\n' + header("host_executor", "types")},
        {"include/ebbtide/types.h": '// #include "ebbtide/engine.h"\n'},
        {"tests/cpp/types_test.cc": header("engine")},
    ],
    ids=[
        "in group",
        "groups before",
        "own header",
        "parts of a unit",
        "last",
        "bindings",
        "comment",
        "tests",
    ],
)
def test_allowed(check_includes: ModuleType, tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, files)
    assert check_includes.check(tmp_path)[0] == []


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("include/ebbtide/types.h", header("error"), "types.h:1: types stands before error"),
        ("include/ebbtide/byte_ranges.h", header("types", "plan"), "byte_ranges.h:2: byte_ranges"),
        ("src/core/plan.cc", "#include <ebbtide/engine.h>\n", "plan.cc:1: plan stands before"),
        ("src/core/stats.cc", "#  include " + header("window")[9:], "stats.cc:1: stats stands"),
        ("src/core/engine.cc", header("spill_file"), "engine must not see spill_file"),
        ("include/ebbtide/journal.h", header("host_pool"), "journal must not see host_pool"),
        ("src/core/window.cc", header("host_executor"), "window must not see host_executor"),
        ("src/core/engine_save.cc", header("host_pool"), "engine must not see host_pool"),
        ("include/ebbtide/newcomer.h", "", "newcomer has no place in GROUPS"),
        ("include/ebbtide/plan.h", header("newcomer"), "plan.h:1: newcomer has no place"),
    ],
)
def test_found(check_includes: ModuleType, tmp_path: Path, name: str, text: str, line: str) -> None:
    write(tmp_path, {name: text})
    (found,) = check_includes.check(tmp_path)[0]
    assert line in found


def test_every_rule_names_units_of_the_table(check_includes: ModuleType) -> None:
    units = [unit for group in check_includes.GROUPS for unit in group]
    assert len(units) == len(set(units))
    for unit, forbidden in check_includes.FORBIDDEN.items():
        assert {unit, *forbidden} <= set(units)


def test_exit_status_and_summary(
    check_includes: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"include/ebbtide/types.h": ""})
    assert check_includes.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "check_includes: 1 files, 0 violations\n"
    write(tmp_path, {"include/ebbtide/types.h": header("engine")})
    assert check_includes.main([str(tmp_path)]) == 1


def test_this_project_is_clean(check_includes: ModuleType) -> None:
    found, count = check_includes.check(SCRIPT.parents[1])
    assert found == []
    assert count > 0
