"""Surefoot api: job control over HTTP. `handlers.py` is the table of its routes.

Reads: every table of the catalogue; `surefoot:events` and `surefoot:logs:<job>` for clients that follow a job.
Writes: `surefoot:requests`, what people asked for and recovery decides on.
Owns: the tables jobs, operations and audit. It keeps nothing of its own: killed and started again it finds every job.
"""
