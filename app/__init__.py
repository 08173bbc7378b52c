"""Soapstone's application: command line, database, use cases and analysis on top of the library packages."""
