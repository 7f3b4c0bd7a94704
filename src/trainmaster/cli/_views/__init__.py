"""Terminal views: tables, bars and curves that verbs print."""
