"""The verbs of whoever runs the server."""
