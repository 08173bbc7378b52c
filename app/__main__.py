"""`python -m app`, and so `torchrun -m app`."""

from app.cli.main import main

if __name__ == "__main__":
    main()
