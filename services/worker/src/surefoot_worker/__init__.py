"""Owns the ranks of a job on this node, and holds the built-in LLM recipe.

Reads: the spec, the staging folder, attempt records.
Writes: logs and events under run_dir, checkpoints under storage.
Owns: the launcher process, the ranks and their staging folder.
"""
