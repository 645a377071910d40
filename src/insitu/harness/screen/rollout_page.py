"""RolloutPage: one rollout as text for a terminal.

Text from a model, a tool or a user's data is shown behind a bar (`│`) with control characters escaped, so
that it cannot pass for a line of this page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import cast

from rich.console import Console
from rich.text import Text

from insitu.harness.rollouts.recorded_call import RecordedCall
from insitu.harness.rollouts.rollout import Rollout
from insitu.harness.screen.safe_output import visible
from insitu.harness.screen.shown_rollout import ShownRollout
from insitu.json_values import JsonObject, as_list, as_object
from insitu.rewards.trajectory import spoken

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
    calls = shown.details.calls
    said = _said(calls)
    for number, call in enumerate(calls, start=1):
        yield Text()
        yield _call_line(shown, call, number, len(calls))
        for message in said[call["id"]]:
            yield from _message(message, console)
        yield from _answer(shown, call, console, tokens=tokens)


def _head(shown: ShownRollout, console: Console) -> Iterator[Text]:
    rollout, details = shown.rollout, shown.details
    yield Text.assemble(("rollout ", "bold"), _inline(rollout.rollout_id))
    where = f"{shown.store}, example {rollout.example_id}, generation {rollout.generation}"
    rows = [("from", where), ("ending", _ending(rollout)), ("reward", _reward(shown))]
    if len(shown.group) > 1:
        rows.append(("group", _group(shown)))
    rows += [("training", shown.selected), ("policy", _policy(details.calls))]
    if rollout.figures.capture is not None:
        rows.append(("calls", _calls(rollout)))
    for name, text in rows:
        yield Text.assemble((f"  {name:<9} ", "bold"), _inline(text))
    said = {"input": details.input, "expected": details.expected, "output": details.output}
    for name, value in (said | {"reasoning": details.reasoning}).items():
        if value is not None:
            yield from _said_by(name, Text(visible(_plain(value))), console)
    if details.traceback is not None:
        yield from _said_by("traceback", Text(visible(details.traceback.text)), console)


def _ending(rollout: Rollout) -> str:
    text = str(rollout.ending)
    if rollout.seconds is not None:
        text += f" after {rollout.seconds:.2f} s"
    if rollout.started_at:
        text += f", started {datetime.fromtimestamp(rollout.started_at).astimezone():%Y-%m-%d %H:%M:%S %z}"
    return f"{text}: {rollout.reason}" if rollout.reason else text


def _reward(shown: ShownRollout) -> str:
    rollout, single = shown.rollout, shown.details.call_rewards
    if rollout.reward is None:
        return "none"
    listed = ", ".join(f"{name} {value:g}" for name, value in rollout.figures.components.items())
    if rollout.failed:
        listed = "that of its ending"
    text = f"{rollout.reward:g}" + (f" ({listed})" if listed else "")
    return text + (f", and {math.fsum(single.values()):g} for single calls" if single else "")


def _calls(rollout: Rollout) -> str:
    """Format the rollout's own calls: those to train on are trained only if the rollout is selected."""
    capture = rollout.capture
    if rollout.reward is None:
        capture = capture.without_training("failed")
    return capture.line().removeprefix("calls ").replace(" trained", " to train on")


def _group(shown: ShownRollout) -> str:
    listed: list[str] = []
    for each in shown.group:
        text = "none" if each.reward is None else f"{each.reward:g}"
        listed.append(f"[{text}]" if each.generation == shown.rollout.generation else text)
    return "rewards of the example's rollouts: " + ", ".join(listed)


def _policy(calls: Sequence[RecordedCall]) -> str:
    versions = {(call["model"], call["policy_step"], call["policy_version"]) for call in calls}
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


def _call_line(shown: ShownRollout, call: RecordedCall, number: int, count: int) -> Text:
    kind = shown.dropped_as(call)
    line = Text.assemble(
        (f"call {number}/{count} ", "bold"), _inline(str(call.get("function") or "<workflow>"))
    )
    line.append(f"  {_inline(str(call['model']))} step {call['policy_step']}  ")
    if kind is None:
        line.append("to train on", style=_TRAINED)
    else:
        line.append(f"not trained: {_inline(kind.replace('_', ' '))}", style=_CONTEXT)
    if (reward := shown.call_reward(call)) is not None:
        line.append(f"  call reward {reward:+g}")
    details = [f"{call['num_prompt_tokens']} prompt + {call['num_output_tokens']} sampled tokens"]
    details.append(_inline(str(call["finish_reason"])))
    details += ["under a grammar"] if call.get("constrained") else []
    if seconds := (call.get("timings") or {}).get("total"):
        details.append(f"{seconds:.2f} s")
    return line.append(f"  {', '.join(details)}", style="dim")


def _said(calls: Sequence[RecordedCall]) -> dict[str, list[JsonObject]]:
    """Return the messages that appear first in each call, by call id."""
    said: dict[str, list[JsonObject]] = {}
    new: list[JsonObject] = []
    for message, call in spoken(calls):
        if call is None:
            new.append(cast(JsonObject, message))
        else:
            said[call["id"]], new = new, []
    return said


def _message(message: JsonObject, console: Console) -> Iterator[Text]:
    role = str(message.get("role", "other"))
    if role == "tool":
        role += f" result {message.get('tool_call_id') or message.get('name') or ''}"
    content = message.get("content")
    yield from _said_by(role, Text(visible(_plain(content)) if content is not None else ""), console)
    yield from _tool_calls(message)


def _answer(shown: ShownRollout, call: RecordedCall, console: Console, *, tokens: bool) -> Iterator[Text]:
    answer = call.get("answer") or {}
    colour = _TRAINED if shown.dropped_as(call) is None else _CONTEXT
    pieces, logprobs = call.get("output_pieces"), call.get("logprobs", [])
    if tokens:
        yield from _token_lines(call, pieces, colour)
    elif pieces is not None:
        yield from _said_by("assistant, as sampled", _coloured(pieces, logprobs, colour), console)
    else:
        text = answer.get("content", answer.get("text"))
        yield from _said_by("assistant", Text(visible(_plain(text)) if text is not None else ""), console)
        sampled = call.get("output_ids", [])
        ids = [f"{token} " for token in sampled[:_MAX_IDS]]
        more = Text(f"and {len(sampled) - _MAX_IDS} more") if len(ids) == _MAX_IDS else Text()
        yield from _said_by("token ids", _coloured(ids, logprobs, colour).append(more), console)
    yield from _tool_calls(answer)


def _token_lines(call: RecordedCall, pieces: list[str] | None, colour: str) -> Iterator[Text]:
    if (prompt := call.get("prompt_text")) is not None:
        last = _quoted(prompt[-60:])
        yield Text(f"  {len(call.get('prompt_ids', []))} prompt tokens, the last of them: {last}")
    yield Text("    number       id   logprob  prob.  text", style="dim")
    ids = call.get("output_ids", [])
    sampled = zip(ids, call.get("logprobs", []), pieces or ["?"] * len(ids), strict=True)
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


def _tool_calls(message: JsonObject) -> Iterator[Text]:
    for asked in map(as_object, as_list(message.get("tool_calls")) or []):
        function = as_object((asked or {}).get("function")) or {}
        said = f"{function.get('name')}({_plain(function.get('arguments'))})  {(asked or {}).get('id') or ''}"
        yield Text.assemble(("  tool call ", "magenta"), _inline(said))


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


def _plain(value: object) -> str:
    """Convert a message's content or a value to text."""
    if isinstance(value, str):
        return value
    texts = [_part_text(part) for part in as_list(value) or []]
    if texts and all(text is not None for text in texts):
        return "\n".join(text or "" for text in texts)
    return json.dumps(value, ensure_ascii=False)


def _part_text(part: object) -> str | None:
    text = (as_object(part) or {}).get("text")
    return text if isinstance(text, str) else None
