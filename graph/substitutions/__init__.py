"""Graph substitutions: equal terms of tensor operators, with parallel tensors, read from a file that was proven.

Source: TASO (SOSP 2019) and Unity (OSDI 2022). `terms` has the language and its types, `rules` the rules of the
packaged file, which `scripts/rules` writes.
"""
