"""The zoo's networks in their published sizes, at batch sizes for which a step takes 0.1 to 10 s on one core."""

NETWORKS = {
    "mlp": 64, "alexnet": 16, "vgg16": 4, "inception": 4, "resnet101": 2, "densenet121": 2, "rnntc": 8, "rnnlm": 8,
    "nmt": 8, "bert-large": 2, "gpt2": 1, "dlrm": 64, "candle-uno": 64,
}  # fmt: skip
QUICK = {"mlp": 8}


def networks(*, quick: bool) -> tuple[dict[str, int], str]:
    """Return the batch sizes of the networks to measure, and the preset of their sizes."""
    return (QUICK, "small") if quick else (NETWORKS, "paper")
