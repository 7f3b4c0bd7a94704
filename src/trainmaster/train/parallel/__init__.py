"""Ranks: process group, sharding, compilation, float8, agreement between ranks."""
