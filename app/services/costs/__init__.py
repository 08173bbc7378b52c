"""What is measured, and what the database has of it: operators, links, environments, packs."""
