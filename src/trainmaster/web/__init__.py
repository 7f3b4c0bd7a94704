"""The web: pages for people, JSON for programs, and the reconciler beside them in one process."""
