"""Timelines of steps, simulated and measured, and the attribution of a step's time."""
