"""`python -m swiftfp8` is the `swiftfp8` command."""

from swiftfp8.cli import main

main()
