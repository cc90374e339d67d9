"""Checkpoints without torch: attempts and lineage, staging memory, storage, the drain between them.

Whatever decides (`ids`, `lineage`, `manifest`, `layout`) is pure. Whatever touches files goes through `store`
or `staging`. A folder of storage is a checkpoint exactly when it holds manifest.json.
"""
