"""The verbs that train, and what comes before and after."""
