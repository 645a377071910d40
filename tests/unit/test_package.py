"""The installed package carries what its metadata claims."""

from __future__ import annotations

from importlib.resources import files


def test_the_package_is_typed() -> None:
    assert (files("insitu") / "py.typed").is_file()
