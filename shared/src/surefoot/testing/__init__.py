"""Fakes and fault injection that ship with the package, so that users can test their own jobs."""
