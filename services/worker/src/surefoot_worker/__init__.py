"""Owns the ranks of jobs on this node: a launcher for each, and a service over them. Holds the built-in LLM recipe.

Reads: table jobs, commands for the ranks, the spec, the staging folder, attempt records, event files, output of ranks.
Writes: tables runs and attempts, events and output of its jobs on the bus, logs and events under run_dir.
Owns: launchers and ranks, the leases of its jobs. Checkpoints are the drain's.
"""
