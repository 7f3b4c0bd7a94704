"""The verbs for jobs: submit, watch, end, pay."""
