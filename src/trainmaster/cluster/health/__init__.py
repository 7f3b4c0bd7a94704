"""Health of the nodes of a cluster: gathered, compared, kept as evidence, and told from one day to the next."""
