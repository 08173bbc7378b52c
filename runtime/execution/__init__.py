"""The execution of a rank's program, step after step, and the full state of its tensors."""
