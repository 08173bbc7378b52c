"""The fuzzer: random arguments, damaged files and kills, each case from a seed and a number."""
