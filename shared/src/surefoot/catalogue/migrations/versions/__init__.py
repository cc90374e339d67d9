"""One module per revision, the newest is the head."""
