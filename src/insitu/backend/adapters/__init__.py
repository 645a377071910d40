"""Uploaded adapters that runs start from: the route, and the checks of what arrives."""
