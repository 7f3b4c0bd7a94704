"""What waits and why, the devices it waits for, expected ends, sets of runs, and what events may take."""
