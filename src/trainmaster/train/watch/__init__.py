"""Watching a run: watchdog, hangs, stragglers, bad steps, out of memory, stop requests."""
