"""Wordings to avoid in pages and error texts, each with a sample and a better wording.

`tests/unit/test_prose.py` applies the rules and tests them on their own samples. Add a rule when you have
mended the same slip twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A wording to avoid. `bad` breaks the rule; `good` says the same better."""

    pattern: str
    bad: str
    good: str

    def breaks(self, text: str) -> bool:
        return re.search(self.pattern, text) is not None


OPENING = r"(?:^|(?<=[.:;!] )|(?<=\| )|(?<=- ))"
RULES = [
    Rule(
        OPENING + r"What (?![^.]*\?)",
        "What was not answered is sent again.",
        "If no answer arrives, send the request again.",
    ),
    Rule(
        OPENING + r"(?:That|Those) of ",
        "That of its loss, with the settings' overrides.",
        "The loss's defaults, with the settings' overrides.",
    ),
    Rule(
        r"\b(?:that|those) which\b",
        "Of equal ones that which nothing has continued.",
        "Ties go to a conversation that nothing has continued.",
    ),
    Rule(
        r"\b(?:is|are) refused with\b",
        "Another address is refused with a short key.",
        "Binding beyond loopback needs a key of at least 32 characters.",
    ),
    Rule(
        r"\b(?:is|are|be|was|were) refused\b(?! with)",
        "Unknown keys are refused.",
        "Unknown keys are rejected.",
    ),
    Rule(
        r"\b(?:put|puts|putting) (?:[\w…]+ ){0,3}back\b",
        "The committed version is put back.",
        "The committed version is restored.",
    ),
    Rule(
        r"\b(?:tried|made|asked|asked for) again\b",
        "The call is tried again.",
        "The call is retried.",
    ),
    Rule(
        r"\banew\b",
        "Correct the file and start anew.",
        "Correct the file and start over.",
    ),
    Rule(
        r"(?<!there )\bis no (?!longer|more|slower|loss|difference|such|supervised)",
        "That is no directory.",
        "That is not a directory.",
    ),
    Rule(
        r"\b[Mm]end\b",
        "Mend the agent, then repeat the command.",
        "Fix the agent, then repeat the command.",
    ),
    Rule(
        r"\bnothing but\b|\bnone but\b",
        "The gateway forwards nothing but calls.",
        "The gateway forwards only calls.",
    ),
    Rule(
        r"\b[Nn]othing is trained of\b",
        "Nothing is trained of a rollout without such a call.",
        "A rollout without such a call is not trained on.",
    ),
    Rule(
        r"\bthat no \w+ answers for\b",
        "A trajectory that no record answers for.",
        "A trajectory that matches no recorded call.",
    ),
    Rule(
        r"\bwhat is (?:not|no)\b",
        "It compares what is not text as JSON.",
        "It compares values other than text as JSON.",
    ),
    Rule(
        r"\b[Aa]nother \w+ than\b",
        "It listens on another address than loopback.",
        "It listens beyond loopback.",
    ),
    Rule(r"\bin the midst of\b", "It restarted in the midst of a rollout.", "It restarted during a rollout."),
    Rule(r"\bso many\b", "Stop after so many validations.", "Stop after this many validations."),
    Rule(r"\bwhatever else\b", "It goes with whatever else is set.", "It goes with all other settings."),
    Rule(
        r"\b(?:in the future|coming soon|will be added|is planned)\b",
        "Support for this is planned.",
        "This is not supported.",
    ),
]
