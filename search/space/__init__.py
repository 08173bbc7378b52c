"""The space of strategies: groups of operators, configurations and placements, baselines and hybrids."""
