"""The loop over epochs: select, train, validate, account."""

from __future__ import annotations

import warnings


def __getattr__(name: str) -> object:
    """Give `EpochTrainer` under its former name, with a DeprecationWarning."""
    if name != "EpochTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from insitu.harness.loop.epoch_trainer import EpochTrainer

    warnings.warn(
        f"{__name__}.{name} is now {EpochTrainer.__module__}.{name}", DeprecationWarning, stacklevel=2
    )
    return EpochTrainer
