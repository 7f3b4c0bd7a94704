"""What waits and why, the devices it waits for, expected ends, and sets of runs."""
