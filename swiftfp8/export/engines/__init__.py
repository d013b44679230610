"""Programs that engines' own environments run: each a file that imports nothing of swiftfp8."""
