"""The goodput ledger: every GPU-second of a job in one bin. Pure functions; docs/how/goodput.md has the definitions."""
