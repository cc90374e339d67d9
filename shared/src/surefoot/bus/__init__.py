"""Streams, publishers and consumers (DESIGN 9)."""
