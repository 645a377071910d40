"""Datasets and rewards."""
