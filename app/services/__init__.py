"""Use cases: each loads what it needs from the store, calls the layers below, and stores what they return."""
