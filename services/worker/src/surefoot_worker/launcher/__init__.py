"""Starts the ranks of a job on this node, watches them, and starts them again when one dies.

One launcher process per job and node runs torch's elastic agent in its main thread. Its ranks are forked from a
fork server that has already imported torch and what the entrypoint imports, so that new ranks run user code a few
milliseconds after an old one died. `main.launch` is the way in; `python -m surefoot_worker.launcher` runs without a
terminal.

Nothing is imported here: the fork server imports this package before it has set itself up.
"""
