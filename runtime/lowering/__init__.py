"""From a plan to the static program of a rank: tensor slots, segments, transfers, weight prefetch."""
