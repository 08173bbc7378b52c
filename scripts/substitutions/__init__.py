"""Finds and proves the rules of graph/substitutions: `scripts/rules`."""
