"""The instructions of a rank's program, and the state that they work on."""
