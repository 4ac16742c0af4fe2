"""`python -m smalti`."""

from smalti.cli.entry import main

main()
