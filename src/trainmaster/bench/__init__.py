"""Acceptance: measuring a cluster against baselines, and finding the part that spoils it."""
