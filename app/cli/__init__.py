"""The command line: options in, services called, tables or JSON out."""
