"""Executes and measures operators, optimizer updates and links on real devices."""
