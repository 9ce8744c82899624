"""`python -m ddpobs.cli` is the `ddpobs` command."""

from ddpobs.cli import main

main()
