"""RolloutPage: one rollout as text for a terminal.

Text from a model, a tool or a user's data is shown behind a bar (`│`) with control characters escaped, so
that it cannot pass for a line of this page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from insitu.harness.rollouts.capture import CAPTURE, Capture
from insitu.harness.screen.safe_output import visible
from insitu.harness.screen.shown_rollout import Json, ShownRollout
from insitu.rewards.trajectory import spoken
from insitu.types import REWARD_COMPONENTS

_SHADES = ("dim", "", "bold", "bold underline", "reverse")
_LIMITS = (0.9, 0.5, 0.1, 0.01)
_LEGEND = ("≥ 90 %", "≥ 50 %", "≥ 10 %", "≥ 1 %", "< 1 %")
_TRAINED, _CONTEXT = "green", "blue"
_MAX_IDS = 200


def page(shown: ShownRollout, console: Console, *, tokens: bool = False) -> Iterator[Text]:
    """Yield the lines of the page; with `tokens`, each sampled token on its own line."""
    yield from _head(shown, console)
    yield Text()
    yield from _legend(shown, console)
    calls = shown.record["calls"]
    said = _said(calls)
    for number, call in enumerate(calls, start=1):
        yield Text()
        yield _call_line(shown, call, number, len(calls))
        for message in said[call["id"]]:
            yield from _message(message, console)
        yield from _answer(shown, call, console, tokens=tokens)


def _head(shown: ShownRollout, console: Console) -> Iterator[Text]:
    record = shown.record
    metadata: Json = record.get("metadata") or {}
    yield Text.assemble(("rollout ", "bold"), _inline(str(record["rollout_id"])))
    where = f"{shown.store}, example {record['example_id']}, generation {record['generation']}"
    rows = [("from", where), ("ending", _ending(record)), ("reward", _reward(record, metadata))]
    if len(shown.group_rewards) > 1:
        rows.append(("group", _group(shown)))
    rows += [("training", shown.selected), ("policy", _policy(record))]
    if CAPTURE in metadata:
        rows.append(("calls", _calls(record, Capture.from_dict(metadata[CAPTURE]))))
    for name, text in rows:
        yield Text.assemble((f"  {name:<9} ", "bold"), _inline(text))
    for name in ("input", "expected", "output", "reasoning"):
        if record.get(name) is not None:
            yield from _said_by(name, Text(visible(_plain(record[name]))), console)


def _ending(record: Json) -> str:
    text = str(record["ending"])
    if record.get("seconds") is not None:
        text += f" after {record['seconds']:.2f} s"
    if record.get("started_at"):
        text += f", started {datetime.fromtimestamp(record['started_at']).astimezone():%Y-%m-%d %H:%M:%S %z}"
    return f"{text}: {record['reason']}" if record.get("reason") else text


def _reward(record: Json, metadata: Json) -> str:
    if record.get("reward") is None:
        return "none"
    parts: Json = metadata.get(REWARD_COMPONENTS) or {}
    listed = ", ".join(f"{name} {value:g}" for name, value in parts.items())
    steps: Json = record.get("step_rewards") or {}
    text = f"{record['reward']:g}" + (f" ({listed})" if listed else "")
    return text + (f", and {math.fsum(steps.values()):g} for single calls" if steps else "")


def _calls(record: Json, capture: Capture) -> str:
    """Format the rollout's own calls: those to train on are trained only if the rollout is selected."""
    if record.get("reward") is None:
        capture = capture.without_training("failed")
    return capture.line().removeprefix("calls ").replace(" trained", " to train on")


def _group(shown: ShownRollout) -> str:
    own = shown.record["generation"]
    listed: list[str] = []
    for number, reward in shown.group_rewards:
        text = "none" if reward is None else f"{reward:g}"
        listed.append(f"[{text}]" if number == own else text)
    return "rewards of the example's rollouts: " + ", ".join(listed)


def _policy(record: Json) -> str:
    versions = {(str(c["model"]), c["policy_step"], str(c["policy_version"])) for c in record["calls"]}
    named = [f"{model}: step {step} ({version or 'not told'})" for model, step, version in sorted(versions)]
    return ", ".join(named) or "no call"


def _legend(shown: ShownRollout, console: Console) -> Iterator[Text]:
    yield Text.assemble(("token texts from ", "bold"), _inline(shown.texts_from))
    if not console.is_terminal or console.no_color:
        return
    for name, colour in (("to train on", _TRAINED), ("context only", _CONTEXT)):
        line = Text.assemble((f"  {name:<13}", "bold"))
        for shade, limit in zip(_SHADES, _LEGEND, strict=True):
            line.append(" ").append(limit, style=f"{colour} {shade}").append(" ")
        yield line.append(" probability when sampled" if colour == _TRAINED else "")


def _call_line(shown: ShownRollout, call: Json, number: int, count: int) -> Text:
    kind = shown.kind(call)
    line = Text.assemble(
        (f"call {number}/{count} ", "bold"), _inline(str(call.get("function") or "<workflow>"))
    )
    line.append(f"  {_inline(str(call['model']))} step {call['policy_step']}  ")
    if kind is None:
        line.append("to train on", style=_TRAINED)
    else:
        line.append(f"not trained: {_inline(kind.replace('_', ' '))}", style=_CONTEXT)
    if (reward := shown.step_reward(call)) is not None:
        line.append(f"  step reward {reward:+g}")
    details = [f"{call['num_prompt_tokens']} prompt + {call['num_output_tokens']} sampled tokens"]
    details.append(_inline(str(call["finish_reason"])))
    details += ["under a grammar"] if call.get("constrained") else []
    timings: Json = call.get("timings") or {}
    if seconds := timings.get("total"):
        details.append(f"{seconds:.2f} s")
    return line.append(f"  {', '.join(details)}", style="dim")


def _said(calls: Sequence[Json]) -> dict[str, list[Json]]:
    """Return the messages that appear first in each call, by call id."""
    said: dict[str, list[Json]] = {}
    new: list[Json] = []
    for message, call in spoken(calls):
        if call is None:
            new.append(dict(message))
        else:
            said[call["id"]], new = new, []
    return said


def _message(message: Json, console: Console) -> Iterator[Text]:
    role = str(message.get("role", "other"))
    if role == "tool":
        role += f" result {message.get('tool_call_id') or message.get('name') or ''}"
    content = message.get("content")
    yield from _said_by(role, Text(visible(_plain(content)) if content is not None else ""), console)
    for asked in message.get("tool_calls") or ():
        yield _tool_call(asked)


def _answer(shown: ShownRollout, call: Json, console: Console, *, tokens: bool) -> Iterator[Text]:
    answer: Json = call.get("answer") or {}
    colour = _TRAINED if shown.kind(call) is None else _CONTEXT
    pieces: list[str] | None = call.get("output_pieces")
    if tokens:
        yield from _token_lines(call, pieces, colour)
    elif pieces is not None:
        yield from _said_by("assistant, as sampled", _coloured(pieces, call["logprobs"], colour), console)
    else:
        text = answer.get("content", answer.get("text"))
        yield from _said_by("assistant", Text(visible(_plain(text)) if text is not None else ""), console)
        ids = [f"{token} " for token in call["output_ids"][:_MAX_IDS]]
        more = Text(f"and {len(call['output_ids']) - _MAX_IDS} more") if len(ids) == _MAX_IDS else Text()
        yield from _said_by("token ids", _coloured(ids, call["logprobs"], colour).append(more), console)
    for asked in answer.get("tool_calls") or ():
        yield _tool_call(asked)


def _token_lines(call: Json, pieces: list[str] | None, colour: str) -> Iterator[Text]:
    if call.get("prompt_text") is not None:
        last = _quoted(call["prompt_text"][-60:])
        yield Text(f"  {len(call['prompt_ids'])} prompt tokens, the last of them: {last}")
    yield Text("    number       id   logprob  prob.  text", style="dim")
    texts = pieces or ["?"] * len(call["output_ids"])
    sampled = zip(call["output_ids"], call["logprobs"], texts, strict=True)
    for number, (token, logprob, text) in enumerate(sampled):
        figures = f"    {number:>6} {token:>8} {logprob:>9.4f} {math.exp(logprob):>6.1%}  "
        yield Text(figures).append(_quoted(text), style=_shade(logprob, colour))


def _quoted(text: str) -> str:
    return json.dumps(visible(text), ensure_ascii=False).replace("\\\\", "\\")


def _coloured(pieces: Sequence[str], logprobs: Sequence[float], colour: str) -> Text:
    text = Text()
    for piece, logprob in zip(pieces, logprobs, strict=False):
        text.append(visible(piece), style=_shade(logprob, colour))
    return text


def _shade(logprob: float, colour: str) -> str:
    probability = math.exp(min(logprob, 0.0))
    shade = next((n for n, limit in enumerate(_LIMITS) if probability >= limit), len(_LIMITS))
    return f"{colour} {_SHADES[shade]}".strip()


def _tool_call(asked: Mapping[str, Any]) -> Text:
    function: Json = asked.get("function") or {}
    said = f"{function.get('name')}({_plain(function.get('arguments'))})  {asked.get('id') or ''}"
    return Text.assemble(("  tool call ", "magenta"), _inline(said))


def _said_by(name: str, text: Text, console: Console) -> Iterator[Text]:
    """Yield a heading and the text's lines behind a bar, wrapped so that none starts at the margin."""
    if not text.plain:
        return
    yield Text(f"  {_inline(name)}", style="bold")
    for line in text.split("\n", allow_blank=True):
        parts = line.wrap(console, console.width - 6, overflow="fold") if console.is_terminal else [line]
        for part in parts or [line]:
            yield Text.assemble(("  │ ", "dim"), part)


def _inline(text: str) -> str:
    """Make foreign text safe within a line of this page."""
    return visible(text).replace("\n", "\\n")


def _plain(value: Any) -> str:
    """Convert a message's content or a value to text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = [_part_text(part) for part in cast("list[Any]", value)]
        if texts and all(text is not None for text in texts):
            return "\n".join(text or "" for text in texts)
    return json.dumps(value, ensure_ascii=False)


def _part_text(part: Any) -> str | None:
    text = cast("Json", part).get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else None
