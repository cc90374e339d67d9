"""Surefoot keeps LLM training running: atomic checkpoints, exact resume, sub-second recovery."""

__version__ = "0.1.0"
