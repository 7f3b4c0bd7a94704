"""Notifications: the outbox, the dispatcher, webhooks and other channels."""
