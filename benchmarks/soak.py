"""The soak from a source tree: an hour of mixed load by default (see --help)."""

import sys

from streamer.bench.soak import main

if __name__ == "__main__":
    sys.exit(main())
