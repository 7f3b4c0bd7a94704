"""Web server: HTML pages, the REST API, and the reconciler beside them in one process."""
