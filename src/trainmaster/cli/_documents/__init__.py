"""YAML documents that a user hands to a verb."""
