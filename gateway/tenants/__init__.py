"""Whom requests are for: API keys, tenants, their rate limits, and the admin endpoints."""
