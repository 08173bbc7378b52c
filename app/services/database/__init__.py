"""`app query`, `app db check` and `app db check --repair`."""
