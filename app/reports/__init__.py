"""The HTML report's template, style and script. They go into the wheel as package data."""
