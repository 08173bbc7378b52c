"""Predictions of single strategies: topology, costs, links, and peak memory."""
