"""Stored strategies: shown, compared, imported, exported."""
