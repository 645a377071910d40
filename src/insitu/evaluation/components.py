"""The components of this room: importing this module registers them."""

from insitu.evaluation import custom_dataset, file_dataset

__all__ = ["custom_dataset", "file_dataset"]
