"""How machines are reached over SSH: hosts file, connections, and the program that runs there first."""
