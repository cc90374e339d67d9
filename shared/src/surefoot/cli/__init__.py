"""The `surefoot` command."""
