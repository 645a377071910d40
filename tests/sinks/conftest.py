"""Every library keeps its files in the test's own directory, and none calls home."""

from __future__ import annotations

import os
import tempfile

os.environ.update(
    {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Read once, when the library is imported.
        "TRACKIO_DIR": tempfile.mkdtemp(prefix="insitu-trackio-"),
        "WANDB_ERROR_REPORTING": "false",
    }
)
