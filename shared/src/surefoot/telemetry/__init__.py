"""Logs and health of services."""
