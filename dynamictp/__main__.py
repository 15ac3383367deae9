"""`python -m dynamictp` is the `dynamictp` command."""

from dynamictp.cli import main

main()
