"""The components of this room: importing this module registers them."""

from insitu.workflow import command as _command
from insitu.workflow import http as _http
from insitu.workflow import python as _python

__all__ = ["_command", "_http", "_python"]
