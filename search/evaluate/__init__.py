"""What a proposal costs, one after the other: in full, or by what it changes."""
