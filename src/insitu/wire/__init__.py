"""Messages that processes share: one frozen definition each, with its ranges, validated by both ends.

    bodies, group_upload, answers   API ◄─► client       routing_table, gateway_state   gateway ◄─► supervisor
    model_call, listed_calls        gateway ─► store, client                    engine   supervisor ─► vLLM
    art                             ART's clients ─► API       starts   adapters, client ─► API

A message is a frozen dataclass over `message.Message`; pydantic reads the definition where one arrives, and
is imported only then. `transport` sends the clients' requests.
"""
