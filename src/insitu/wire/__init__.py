"""Messages that processes share: one frozen definition each, with its ranges, validated by both ends.

Only the standard library and `annotated_types` are imported here; pydantic reads the definitions where a
message arrives.
"""
