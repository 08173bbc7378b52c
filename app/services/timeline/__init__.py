"""Timelines of steps, simulated and measured, and where a step's time goes."""
