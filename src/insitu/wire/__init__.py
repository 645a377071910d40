"""Messages that two processes share: one frozen definition each, with its ranges, that both ends validate by.

Only the standard library and `annotated_types` are imported here; pydantic reads the definitions where a
message comes in.
"""
