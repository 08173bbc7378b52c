"""`app search`: starts, algorithms, bound, and what is stored of what they find."""
