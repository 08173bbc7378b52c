"""Measurements and their rows in the database: operators, links, environments, packs."""
