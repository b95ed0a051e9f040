"""python -m benchmarks NAME [flags]: see harness.py."""

import sys

from benchmarks.harness import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell has it
