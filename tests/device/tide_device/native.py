"""The compiled module."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

from .build import DeviceUnavailable, library


def _load() -> ModuleType:
    path = library()
    loader = importlib.machinery.ExtensionFileLoader("_tide", str(path))
    spec = importlib.util.spec_from_file_location("_tide", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except ImportError as error:
        raise DeviceUnavailable(f"{path} does not load: {error}") from error
    sys.modules["_tide"] = module
    return module


tide = _load()
