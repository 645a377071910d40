"""Fixtures of all integration tests."""

from tests.support.vllm_server import vllm_tiny

__all__ = ["vllm_tiny"]
