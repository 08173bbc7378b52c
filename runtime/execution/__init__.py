"""The execution of a rank's program, step after step, and whole tensors of what the ranks hold."""
