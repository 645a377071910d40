"""The YAML as plain values: parse, interpolate, override, explain."""
