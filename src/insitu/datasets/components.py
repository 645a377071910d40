"""Register the built-in datasets: importing this module does it."""

from insitu.datasets import custom_dataset, file_dataset

__all__ = ["custom_dataset", "file_dataset"]
