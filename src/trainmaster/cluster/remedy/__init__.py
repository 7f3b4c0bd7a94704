"""Nodes taken out of service and given back, through their scheduler."""
