"""Secrets: their shapes in any text (shapes.py), and where a spec holds one (in_spec.py)."""
