"""Alembic's entry: run the revisions on the connection that `bring_up` passes, in its transaction."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"], target_metadata=context.config.attributes["tables"]
)
context.run_migrations()
