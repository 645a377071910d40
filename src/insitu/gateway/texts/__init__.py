"""Answers as text and tool calls, read without the engine."""
