"""The writer: sees that checkpoints become durable, verifies each, and promotes those that proved themselves.

Reads: surefoot:events (group writer), the tables jobs and checkpoints, storage, staging folders.
Writes: CheckpointVerified and CheckpointPromoted on surefoot:events, stable.json, damage reports for the drains.
Owns: the table checkpoints, `<home>/run/writer/`, the Celery queue of chores.
"""
