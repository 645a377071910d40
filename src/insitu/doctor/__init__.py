"""`insitu doctor`: check that a machine computes what insitu expects of it.

`device.py` runs the checks of `--device` in order: the trainer's side in a process of its own, which ends
and gives the device back, then a real engine.
"""
