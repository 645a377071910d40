"""The model that learns: base, adapters, attention, output head, and its export."""
