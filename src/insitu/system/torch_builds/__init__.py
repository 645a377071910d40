"""Packages that were built for another torch than the one beside them."""
