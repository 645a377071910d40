"""What can go wrong between the gateway and one engine, as far as it decides what happens next.

These never reach a client: the retry loop turns them into another attempt or into an `UpstreamError`.
"""

from __future__ import annotations


class Fault(Exception):
    """An attempt failed before anything was recorded, so it may be made again."""


class ReplicaLost(Fault):
    """The connection failed or timed out: the replica is taken out until it answers its probe."""


class ReplicaFailed(Fault):
    """The replica answered with a server error or nonsense: it is probed, the call goes elsewhere."""


class ReplicaBusy(Fault):
    """The replica answered 429: it is healthy, but the call should wait or go elsewhere."""


class VersionMismatch(Fault):
    """The engine reports other weights than the table promised: try again after the table settles."""


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""
