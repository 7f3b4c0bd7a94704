"""OLMo 2 (arXiv 2501.00656): norms after each branch, and over the whole query and key."""
