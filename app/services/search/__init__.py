"""`app search`: starts, algorithms, lower bound, and the rows of a search."""
