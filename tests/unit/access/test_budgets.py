"""Every semaphore, queue, pool, bounded map and `max_…` of a server is classified: what is shared has shares.

A new one fails here until it says which it is. What senders hold together, and another sender could need, is
`SHARED`: it is a `Shares`, `Turns`, `PlaceQueue` or `FairMemory`, and the test beside it holds it and asks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import insitu

ROOT = Path(insitu.__file__).parent
SERVERS = ("gateway", "access", "backend/api", "backend/http", "backend/art", "backend/adapters")
STORES = ("backend/ledger", "records", "database")
KINDS = frozenset(
    {"Semaphore", "BoundedSemaphore", "CapacityLimiter", "Condition", "Queue", "LifoQueue", "PriorityQueue"}
    | {"SimpleQueue", "deque", "OrderedDict", "ThreadPoolExecutor", "ProcessPoolExecutor", "LRUCache"}
    | {"TTLCache", "lru_cache", "cache", "Shares", "Turns", "PlaceQueue", "FairMemory", "Bodies"}
)
SIZES = frozenset({"pool_size", "max_overflow", "maxsize", "maxlen", "max_workers", "backlog"})

SHARED = {
    "gateway/app.py Gateway.__init__ Shares": "gateway/test_shares_of_senders.py",
    "gateway/app.py Gateway.__init__ Bodies": "gateway/test_shares_of_senders.py",
    "gateway/shared/bodies.py Bodies.__init__ Shares": "gateway/test_shares_of_senders.py",
    "gateway/shared/settings.py Limits max_calls": "gateway/test_shares_of_senders.py",
    "gateway/shared/settings.py Limits max_bodies_bytes": "gateway/test_shares_of_senders.py",
    "gateway/shared/settings.py Limits max_listings": "access/test_shares.py",
    "gateway/recording/listings.py Listings.__init__ Turns": "access/test_shares.py",
    "gateway/recording/listings.py Listings.__init__ ThreadPoolExecutor": "access/test_shares.py",
    "gateway/engines/replicas.py ReplicaPool.__init__ PlaceQueue": "gateway/test_places.py",
    "gateway/sampled_ids/history.py History.__init__ FairMemory": "access/test_fair_memory.py",
    "gateway/recording/tally.py Tallies.__init__ FairMemory": "access/test_fair_memory.py",
    "gateway/protocols/kept_items.py _Memory.__init__ FairMemory": "access/test_fair_memory.py",
    "gateway/shared/settings.py Limits max_remembered_rollouts": "access/test_fair_memory.py",
    "gateway/shared/settings.py Limits max_remembered_tokens": "access/test_fair_memory.py",
    "gateway/shared/settings.py Limits max_counted_rollouts": "access/test_fair_memory.py",
    "gateway/recording/tally.py Tallies.__init__ _max_rollouts": "access/test_fair_memory.py",
    "gateway/protocols/kept_items.py  _MAX_BYTES": "access/test_fair_memory.py",
    "gateway/protocols/kept_items.py _Memory.__init__ _max_bytes": "access/test_fair_memory.py",
    "backend/api/settings.py Services.__init__ Shares": "api/test_api_events.py",
    "backend/api/settings.py Services.__init__ Turns": "api/test_api_limits.py",
    "backend/api/settings.py Limits max_streams": "api/test_api_events.py",
    "backend/api/settings.py Limits max_uploads": "api/test_api_limits.py",
    "access/shares.py Turns.__init__ Shares": "access/test_shares.py",
}
"""With the test, below tests/unit, in which one project holds it and another asks for some."""

STRANGERS = {
    *("gateway/shared/settings.py Limits max_connections", "gateway/shared/settings.py Limits max_newcomers"),
    *("backend/api/settings.py Limits max_connections", "backend/api/settings.py Limits max_newcomers"),
    *("gateway/connection.py Site.__init__ __init__(backlog)",),
    *("gateway/connection.py Site.start create_server(backlog)",),
}
"""Held by connections: of those without a valid key, the oldest is closed (`tests/faults/test_flood.py`)."""

OF_ONE_REQUEST = {
    *(
        "gateway/shared/settings.py Limits " + name
        for name in (
            "max_attempts",
            "max_body_bytes",
            "max_choices",
            "max_grammar_bytes",
            "max_grammar_depth",
            "max_grammar_seconds",
            "max_json_depth",
            "max_json_values",
            "max_output_tokens",
            "max_pattern_chars",
            "max_pattern_size",
            "max_tools_bytes",
            "max_top_logprobs",
        )
    ),
    *(
        "backend/api/settings.py Limits " + name
        for name in (
            "max_adapter_bytes",
            "max_body_bytes",
            "max_body_values",
            "max_call_age_seconds",
            "max_calls_per_trajectory",
            "max_group_bytes",
            "max_head_bytes",
            "max_line_bytes",
            "max_line_values",
            "max_training_values",
            "max_trajectories",
        )
    ),
    "backend/http/connection.py _Connection max_head_bytes",
    "backend/http/connection.py connection_class.Connection max_head_bytes",
    "backend/adapters/reader.py  _MAX_HEAD_BYTES",
    "backend/adapters/safetensors_header.py  MAX_HEADER_BYTES",
    "backend/adapters/safetensors_header.py  _MAX_VALUES",
    "gateway/engines/sample.py  _MAX_TOKEN_ID",
    "gateway/protocols/chat.py ChatProtocol.parse max_tokens",
    "gateway/protocols/completions.py CompletionsProtocol.parse max_tokens",
    "gateway/sampled_ids/restore.py _fitted max_tokens",
    "gateway/sampled_ids/history.py  MAX_CONVERSATIONS",  # of one rollout
}
"""Bounds of what one request, line, file or rollout may be; nothing is held beyond it."""

OF_THE_PROCESS = {
    "access/audit_log.py  _MAX_CHARS",
    "access/day_use.py  _MAX_BYTES",
    "access/key_file.py  MAX_KEYS",
    "access/key_file.py  _MAX_BYTES",
    "access/keyring.py  MAX_AGE_SECONDS",
    "backend/api/health.py  _MAX_STATUS_BYTES",
    "gateway/engines/replicas.py  _MAX_BACKOFF_SECONDS",
    "gateway/engines/replicas.py ReplicaPool.__init__ _max_loras",
    "gateway/engines/routes.py Table max_loras",
    "gateway/engines/upstream.py ServedModel max_model_len",
    "gateway/engines/upstream.py _Card max_model_len",
    "gateway/sampled_ids/tokenizers.py Served max_model_len",
    "gateway/sampled_ids/tokenizers.py  _MAX_KNOWN",  # looked up again
    "gateway/recording/journal.py  _MAX_SEGMENT_BYTES",
    # Written in the order of arrival and emptied by the disk alone; senders cannot hold an entry.
    "gateway/recording/journal.py Journal.__init__ deque",
    "gateway/recording/recorder.py  _MAX_BATCH",
    "gateway/recording/recorder.py Recorder.__init__ Condition",
    "gateway/recording/recorder.py Recorder.__init__ deque",
    "gateway/recording/recorder.py Recorder.__init__ _max_backlog",
    "gateway/shared/settings.py Limits max_record_backlog",
    "database/writer.py GroupCommitWriter.__init__ Queue",
    "database/writer.py GroupCommitWriter.__init__ Queue(maxsize)",
    "database/writer.py GroupCommitWriter.__init__ _max_batch",
    # A connection is held for one query, with the server's own deadline.
    "backend/ledger/schema.py open_engine open_engine(max_overflow)",
    "backend/ledger/schema.py open_engine open_engine(pool_size)",
    "database/engine.py open_engine create_engine(max_overflow)",
    "database/engine.py open_engine create_engine(pool_size)",
    "records/tables.py connect open_engine(max_overflow)",
    "records/tables.py connect open_engine(pool_size)",
    # What is forgotten is computed again.
    "records/store.py  _MAX_ROLLOUTS_WITH_TAILS",
    "records/store.py RecordStore.__init__ OrderedDict",
    # Parts of PlaceQueue and FairMemory themselves.
    "gateway/engines/places.py PlaceQueue.__init__ OrderedDict",
    "gateway/engines/places.py PlaceQueue._add OrderedDict",
    "gateway/engines/places.py PlaceQueue._add deque",
    "access/fair_memory.py FairMemory.put OrderedDict",
}
"""Work of the process itself, that no sender can hold for longer than it takes."""

CLASSES = (set(SHARED), STRANGERS, OF_ONE_REQUEST, OF_THE_PROCESS)


def scanned() -> set[str]:
    """`<file> <where> <name>` of everything that bounds something."""
    folders = [ROOT / folder for folder in SERVERS + STORES]
    paths = [path for folder in folders for path in folder.rglob("*.py") if "versions" not in path.parts]
    return {f"{path.relative_to(ROOT)} {found}" for path in paths for found in bounds_in(path.read_text())}


def bounds_in(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        where = _where(node, above)
        if isinstance(node, ast.Call):
            name = _name(node.func)
            if name in KINDS:
                yield f"{where} {name}"
            yield from (f"{where} {name}({k.arg})" for k in node.keywords if k.arg in SIZES)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            names = [_name(target) for target in targets]
            yield from (f"{where} {name}" for name in names if name.lstrip("_").lower().startswith("max_"))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (f"{where} {node.name}" for each in node.decorator_list if _name(each) in KINDS)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript | ast.Call):
        return _name(node.value if isinstance(node, ast.Subscript) else node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _where(node: ast.AST, above: dict[ast.AST, ast.AST]) -> str:
    names: list[str] = []
    while (found := above.get(node)) is not None:
        node = found
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.insert(0, node.name)
    return ".".join(names)


def test_everything_that_bounds_something_is_classified() -> None:
    known = set[str]().union(*CLASSES)
    found = scanned()
    assert found - known == set(), "say in this file whether senders share it"
    assert known - found == set(), "no longer there"
    assert sum(map(len, CLASSES)) == len(known), "each is of one class"


@pytest.mark.parametrize("test", sorted(set(SHARED.values())))
def test_what_is_shared_has_a_test_with_two_projects(test: str) -> None:
    source = (Path(__file__).parents[1] / test).read_text()
    assert "project" in source or "FairMemory" in source


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            "from asyncio import Semaphore\nclass A:\n    def f(self):\n        self.s = Semaphore(3)",
            "A.f Semaphore",
        ),
        ("import queue\nq = queue.Queue(maxsize=3)", " Queue(maxsize)"),
        ("_MAX_THINGS = 3", " _MAX_THINGS"),
        ("from collections import deque\nx: deque[int] = deque[int]()", " deque"),
        ("from functools import lru_cache\n@lru_cache(3)\ndef f(): ...", " f"),
    ],
)
def test_the_scan_finds(source: str, found: str) -> None:
    assert found in set(bounds_in(source))
