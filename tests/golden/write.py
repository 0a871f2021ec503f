"""Writes the golden numbers of this kind of machine, of all recipes or of those that are named.

    python -m tests.golden.write [NAME ...]

Only from a commit whose numbers are right: see tests/golden/test_golden_runs.py.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

from tests.golden import recipes


def main(names: list[str]) -> None:
    """Runs the recipes and writes a file for each."""
    if unknown := set(names) - set(recipes.RECIPES):
        sys.exit(f"No recipe {', '.join(sorted(unknown))}; there are {', '.join(recipes.RECIPES)}.")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or recipes.RECIPES:
            records = recipes.run(name, pathlib.Path(folder))
            path = recipes.file(name)
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
            print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
