"""Algebraic substitutions: which there are, what they rewrite, why they are right."""
