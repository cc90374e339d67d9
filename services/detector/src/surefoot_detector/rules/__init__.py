"""The rules: pure, O(1) a point. `judge` puts them together; nothing here knows of jobs, attempts or events."""
