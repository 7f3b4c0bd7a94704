"""Llama 2 and 3, and the decoders that differ from them by an option: Mistral, Qwen2, Qwen3 (dense)."""
