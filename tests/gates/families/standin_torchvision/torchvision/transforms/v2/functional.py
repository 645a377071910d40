from __future__ import annotations

from torchvision import __getattr__  # noqa: F401 - the stand-in beside it
