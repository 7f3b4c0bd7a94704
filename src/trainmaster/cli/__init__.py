"""The command line: one file per verb. The folder is the registry; a file whose name starts with _ is no verb."""
