"""Fixtures of the contract tests."""

from helpers.command_line import surefoot

__all__ = ["surefoot"]
