"""Mixtures of experts as in Mixtral: Llama's block, whose feed-forward is chosen for each token."""
