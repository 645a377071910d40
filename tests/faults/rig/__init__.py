"""A backend in one process that is killed, or whose machine loses power, at a chosen change of its disk."""
