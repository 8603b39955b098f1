"""Write the embedded corpus and print some samples: `python -m dataset.builtin --output DIR --samples 12`."""

import argparse
import json
import random
from pathlib import Path

from dataset.builtin.store import ensure_builtin_corpus


def main() -> None:
    """Write the corpus to a folder and print samples of every file in turn."""
    default = Path(__file__).resolve().parents[2] / "data" / "builtin"
    parser = argparse.ArgumentParser(prog="python -m dataset.builtin", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=default, help=f"folder of the corpus (default: {default})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts (default: 0)")
    parser.add_argument("--samples", type=int, default=12, help="how many rows to print (default: 12)")
    options = parser.parse_args()
    try:
        paths = ensure_builtin_corpus(options.output, options.seed)
    except ValueError as problem:
        parser.error(str(problem))
    for name, path in paths.items():
        print(f"{name:16} {path.stat().st_size:>9,} bytes")
    rng = random.Random(options.seed)
    rows = {name: path.read_text(encoding="utf-8").splitlines() for name, path in paths.items()}
    for index in range(options.samples):
        name = list(rows)[index % len(rows)]
        print(f"\n--- {name}")
        print(json.dumps(json.loads(rng.choice(rows[name])), ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
