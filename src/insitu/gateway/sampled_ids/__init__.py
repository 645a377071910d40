"""Keep the ids really sampled through the turns of a conversation."""
