"""From a strategy to the time and memory of its step: fragments, task graph, simulation in every order."""
