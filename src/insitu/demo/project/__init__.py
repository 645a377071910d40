"""The files of the demo's project; they are copied, and run outside of the package."""
