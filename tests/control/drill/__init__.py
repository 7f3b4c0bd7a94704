"""The control plane as processes that are killed at named places, and the ledger that tells whether anybody noticed."""
