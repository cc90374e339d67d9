"""The worker as a service: takes jobs by lease, supervises their launchers, carries events out and commands in."""
