"""Packaged topologies, one YAML file each, and the reader of that format."""
