"""The server half: API and ledger, trainer and engine actors, checkpoints, and the supervisor over them."""
