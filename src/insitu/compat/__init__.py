"""Adapters that let programs written for other systems train on an insitu backend."""
