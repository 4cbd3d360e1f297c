"""A rank that limits its memory and allocates: `memory_rank.py MEGABYTES_ALLOWED MEGABYTES_TAKEN [torch]`, rank 1 only.

It prints after each megabyte, so that one can see how far it came.
"""

import os
import sys
import time

from testbed.limits import limit_memory, memory_use, peak_memory, reset_peak

MEGABYTE = 1 << 20


def main() -> None:
    allowed, taken = int(sys.argv[1]), int(sys.argv[2])
    if "torch" in sys.argv:
        import torch  # noqa: F401
    if int(os.environ["RANK"]) != 1:
        time.sleep(60 if taken > allowed else 0)
        return
    assert limit_memory(allowed * MEGABYTE)
    kept = []
    for number in range(1, taken + 1):
        kept.append(bytearray(b"1") * MEGABYTE)
        print(number, flush=True)
    print("used", memory_use())
    kept.clear()
    print("freed", memory_use())
    print("peak", peak_memory())
    reset_peak()
    print("reset", peak_memory())


if __name__ == "__main__":
    main()
