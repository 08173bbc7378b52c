"""Train a network of one's own under a strategy, on as many processes as the strategy has devices:

    app search --model train:example --topology local --devices 2
    app strategy export 1 strategy.json
    torchrun --nproc-per-node 2 train.py strategy.json

Run it in the folder of this file. `example`, which `--model train:example` names, gives the inputs that fix sizes.
"""

import sys

import torch
from torch import nn

BATCH_SIZE = 32


class Classifier(nn.Module):
    """Returns its loss, as every module that Soapstone trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: nn.Module = nn.Sequential(
            nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3)
        )

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(points), labels)


def example() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    return Classifier(), (torch.randn(BATCH_SIZE, 20), torch.zeros(BATCH_SIZE, dtype=torch.long)), {}


def main(strategy: str) -> None:
    import runtime

    # The same data in the same order on every rank: each takes what its part of the strategy needs.
    torch.manual_seed(0)
    points = torch.randn(640, 20)
    labels = (points[:, :3] + 0.1 * torch.randn(640, 3)).argmax(1)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(points, labels), BATCH_SIZE, shuffle=True, drop_last=True
    )
    module, args, kwargs = example()
    with runtime.parallelize(
        module,
        strategy,
        args,
        kwargs,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    ) as trainer:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, T_max=5)
        for epoch in range(5):
            for batch in loader:
                loss = trainer.backward(*batch)
                trainer.clip_grad_norm(1.0)
                trainer.apply()
            scheduler.step()
            if trainer.rank == 0:
                print(f"epoch {epoch}: loss {float(loss):.4f}")
        module.load_state_dict(trainer.state_dict())
        if trainer.rank == 0:
            module.eval()
            right = (module.get_submodule("layers")(points).argmax(1) == labels).float().mean()
            print(f"right: {float(right):.1%}")


if __name__ == "__main__":
    main(sys.argv[1])
