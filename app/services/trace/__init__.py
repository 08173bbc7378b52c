"""The trace of a search: how proposals are recorded, and how strategies follow from them again."""
