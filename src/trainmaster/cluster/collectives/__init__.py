"""Collectives and bandwidth between nodes, pair tests, and how ranks are started together."""
