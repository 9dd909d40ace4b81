"""The load benchmark from a source tree: python benchmarks/load.py MODEL --all (see --help)."""

import sys

from streamer.bench.load import main

if __name__ == "__main__":
    sys.exit(main())
