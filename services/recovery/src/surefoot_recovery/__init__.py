"""Surefoot recovery: anomalies, failures and requests become commands; it keeps the record of incidents.

Reads: streams `surefoot:events` and `surefoot:requests` (group `recovery`), tables `jobs`, `runs`, `attempts` and
`checkpoints`. Writes: stream `surefoot:commands:<job>`, IncidentChanged on `surefoot:events`. Owns: tables `incidents`
and `actions`.
"""
