"""`python -m app`, and so `torchrun -m app`."""

from app.cli.main import command

if __name__ == "__main__":
    command()
