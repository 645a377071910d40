"""The short form of a file: keys for the usual sections, and defaults for what may be left out."""
