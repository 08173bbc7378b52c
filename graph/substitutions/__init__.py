"""Substitutions: what graphs are rewritten by, and the proven rules behind it.

Source: TASO (SOSP 2019) and Unity (OSDI 2022). `rewriting` has the rules that graphs of networks are rewritten by, each
a `substitution` that strategies name. `terms` has a language of equal small graphs and its types, with parallel
tensors, `rules` those of the packaged file, which `scripts/rules` finds and proves.
"""
