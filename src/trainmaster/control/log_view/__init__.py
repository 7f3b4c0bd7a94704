"""Reading logs for people: windows by byte offset, and search in a process that can be stopped."""
