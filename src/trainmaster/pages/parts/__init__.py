"""Parts of pages that are no page themselves."""
