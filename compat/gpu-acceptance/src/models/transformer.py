"""The Transformer."""

from trainmaster.models.transformer import Transformer, TransformerSize

__all__ = ["Transformer", "TransformerSize"]
