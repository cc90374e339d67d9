"""The writer: sees that checkpoints become durable, verifies, promotes and removes them.

Reads: surefoot:events (group writer), the tables jobs, checkpoints and actions, storage, staging folders.
Writes: CheckpointVerified, CheckpointPromoted and CheckpointPruned on surefoot:events, stable.json, `trash/` and what
is removed of storage, damage reports for the drains.
Owns: the table checkpoints, `<home>/run/writer/`, the Celery queue of chores.
"""
