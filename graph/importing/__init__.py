"""The steps of an import: export, lowering to our operators, propagation of factors."""
