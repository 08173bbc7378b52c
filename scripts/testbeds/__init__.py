"""Hosts made of one machine: network namespaces joined by links of a limited rate, and commands on them."""
