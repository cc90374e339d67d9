"""Surefoot on one machine: a Redis-compatible server and all services as supervised processes."""
