"""The verbs that prove machines and clusters."""
