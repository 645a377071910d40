"""The settings of a gateway process: addresses, keys and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from insitu.system.drain import DRAIN_SECONDS, FLUSH_SECONDS
from insitu.system.keys import check_key
from insitu.system.tls import TlsFiles, check_listener


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the hot path in one place."""

    max_body_bytes: int = 8 * 2**20
    max_bodies_bytes: int = 512 * 2**20
    """Estimated memory of all requests under way, raw and parsed; beyond it a call gets 429."""
    max_json_depth: int = 64
    max_json_values: int = 2**19
    """Values in one body; an upper bound is counted before anything is parsed."""
    max_grammar_bytes: int = 32 * 2**10
    """JSON bytes of a `response_format`, or of one tool: compiling takes up to the square of them."""
    max_tools_bytes: int = 256 * 2**10
    """JSON bytes of all tools of a request."""
    max_grammar_seconds: float = 20.0
    """Estimated time of the grammar compiler for all that one request has it work on."""
    max_grammar_depth: int = 32
    max_pattern_chars: int = 1024
    max_pattern_size: int = 10_000
    """Characters of a pattern with its repetitions written out, and counts in a schema such as `maxItems`."""
    max_output_tokens: int = 131_072
    max_top_logprobs: int = 20
    max_calls: int = 4096
    """Calls at a gateway at once: arriving, held or under way; each of `n` choices counts."""
    spill_margin: int = 8
    """Calls that a rollout's replica may have beyond twice those of the least loaded one."""
    max_record_backlog: int = 4096
    record_seconds: float = 30.0
    """Longest wait of an answer for its record, when the journal cannot be written."""
    hold_seconds: float = 600.0
    """Longest wait of a call if no hold sets one: no table yet, or no healthy replica."""
    settle_seconds: float = 5.0
    """Longest wait for the next table before a call whose version did not match is retried."""
    max_connections: int = 16_384
    max_newcomers: int = 10_240
    """Connections without a valid key so far; of more, the oldest is closed. Above all calls that may be
    under way or held, since an agent may open that many connections at once."""
    head_seconds: float = 15.0
    """Longest time from the connection to its first request with a valid key."""
    idle_seconds: float = 75.0
    """Longest time between two requests, up to the end of the second one's headers."""
    body_seconds: float = 60.0
    write_seconds: float = 20.0
    """Longest wait for a client to read what was sent; then its connection is closed."""
    max_attempts: int = 4
    connect_seconds: float = 5.0
    render_seconds: float = 60.0
    generate_seconds: float = 900.0
    stream_interval: int = 8
    """Tokens in a chunk of the engine's stream, after the first token."""
    probe_interval_seconds: float = 2.5
    """Less than a connection to an engine is kept, so that a probe needs no new one."""
    probe_timeout_seconds: float = 10.0
    drain_seconds: float = DRAIN_SECONDS
    """Time that calls under way have to finish when the process stops; then they are broken off."""
    flush_seconds: float = FLUSH_SECONDS
    """Time to write their records after that."""
    max_listings: int = 4
    """Lists of calls read at once; others queue, so that they never crowd out the calls themselves."""
    listing_seconds: float = 30.0
    """Longest wait of a list for its turn and for the writer."""
    max_counted_rollouts: int = 65_536
    """Rollouts whose requests are counted; the least recently used counts are forgotten."""
    max_choices: int = 16
    """The largest `n`."""
    max_remembered_rollouts: int = 65_536
    max_remembered_tokens: int = 32 * 2**20
    """Ids of recent calls kept for the turns that follow, 4 bytes each. A supervisor gives more if it can."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One gateway process. Keys never appear in `repr`."""

    records_url: str = field(repr=False)
    api_key: str = field(repr=False)
    admin_key: str = field(default="", repr=False)
    host: str = "127.0.0.1"
    port: int = 8000
    upstreams: tuple[str, ...] = ()
    """Engines of a standalone gateway; empty when a supervisor sends the table."""
    tokenizer: Path | None = None
    """The directory of the served model's `tokenizer.json`, if not where the engine says its model is."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names by which clients may call a gateway on loopback, through a proxy; in lower case."""
    tls: TlsFiles | None = None
    behind_proxy: bool = False
    keys_file: Path | None = None
    """The keys that `insitu keys` creates, where a supervisor has them; it need not exist."""
    number: int = 0
    """Its place among the backend's gateways, from 0."""
    engine_key: str = field(default="", repr=False)
    """Opens the engines' door; empty for engines of others, which have none."""
    limits: Limits = field(default_factory=Limits)

    def check(self) -> None:
        """Reject an address that needs a stronger key, or TLS."""
        check_key(self.api_key, self.host)
        check_listener(self.host, self.tls, behind_proxy=self.behind_proxy)
