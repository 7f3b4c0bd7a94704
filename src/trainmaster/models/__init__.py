"""Single-device models; a family of language models is a folder (README.md). train/parallel/ shards them over ranks."""
