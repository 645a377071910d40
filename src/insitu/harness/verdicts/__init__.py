"""The verdict line: whether a run learns, or why not, with the setting to try."""
