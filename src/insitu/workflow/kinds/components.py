"""The components of this room: importing this module registers them."""

from insitu.workflow.kinds import command as _command
from insitu.workflow.kinds import http as _http
from insitu.workflow.kinds import python as _python

__all__ = ["_command", "_http", "_python"]
