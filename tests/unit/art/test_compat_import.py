"""Without ART the backend object says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_without_art_the_import_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    for name in ("art", "art.types"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "insitu.compat.art", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'insitu\[art\]'"):
        importlib.import_module("insitu.compat.art")
