"""Our own queue at work, and sets of runs."""
