"""`python -m smalti`."""

from smalti.cli import main

main()
