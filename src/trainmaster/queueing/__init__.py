"""Our own queue, for machines that have none: the rules as a pure function over what is free, runs and waits."""
