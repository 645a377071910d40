"""Framework: one that a new project can be written for, and the packages its agent imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from insitu.system.torch_builds.installing import install_command


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework's name for people, its template, and the requirements that pip installs for it."""

    label: str
    template: str
    requirements: Sequence[str]
    distributions: Sequence[str]
    """Packages that the requirements bring, as pip lists them."""

    @property
    def install_command(self) -> str:
        """The command that installs it."""
        return install_command(*self.requirements)

    def missing(self) -> list[str]:
        """Return the distributions that are not installed here."""
        return [name for name in self.distributions if not _is_installed(name)]


FRAMEWORKS = {
    "openai": Framework("the OpenAI SDK", "openai.py", ["insitu[openai]"], ["openai"]),
    "langgraph": Framework(
        "LangGraph", "langgraph.py", ["insitu[langchain]", "langgraph"], ["langgraph", "langchain-openai"]
    ),
    "openai-agents": Framework(
        "the OpenAI Agents SDK", "openai_agents.py", ["insitu[openai-agents]"], ["openai-agents"]
    ),
    "llamaindex": Framework(
        "LlamaIndex",
        "llamaindex.py",
        ["insitu[llama-index]"],
        ["llama-index-core", "llama-index-llms-openai-like"],
    ),
    "adk": Framework("Google ADK", "adk.py", ["insitu[google-adk]"], ["google-adk", "anthropic"]),
}
"""By the names that `insitu init --framework` takes."""


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
