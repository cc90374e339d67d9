"""Surefoot gateway: all events as Prometheus metrics and a live page.

Reads: the stream surefoot:events, from its beginning and without a group. Writes: nothing.
Owns: GET /metrics, the live page and its JSON, /healthz and /readyz.
"""
