"""Schema revisions, one file each in `versions/`, run by store/migrate.py."""
