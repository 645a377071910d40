"""One model call, from admission to answer."""
