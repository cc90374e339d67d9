"""The tables that services share, their queries and migrations. Each table has one writing service."""
