"""Touching the machine: its commands and files, who this process is, and the event file."""
