"""Read a file with many requests in flight, past the page cache, and say how fast that was.

python examples/nvme_bandwidth.py FILE --block 8 --depth 16
"""

import argparse
import time
from collections import deque

from offload import aio


def read(path: str, block: int, depth: int) -> tuple[int, float, str]:
    """Bytes read, seconds, and the backend that read them."""
    done = 0
    with (
        aio.open(path) as file,
        aio.AioHandle(block_size=block, queue_depth=depth) as handle,
        aio.alloc(block * depth, lock=False) as memory,
    ):
        in_flight: deque[aio.IOFuture] = deque()
        start = time.perf_counter()
        for i, offset in enumerate(range(0, file.size, block)):
            if len(in_flight) == depth:  # the oldest request frees the piece it read into
                done += in_flight.popleft().result()
            at = i % depth * block
            piece = memory.view(at, at + min(block, file.size - offset))
            in_flight.append(handle.async_pread(piece, file, offset))
        done += sum(future.result() for future in in_flight)
        seconds = time.perf_counter() - start
        del piece
        return done, seconds, handle.backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--block", type=int, default=8, help="MiB of a request")
    parser.add_argument("--depth", type=int, default=16, help="requests in flight")
    args = parser.parse_args()

    for depth in (1, args.depth):
        done, seconds, backend = read(args.file, args.block << 20, depth)
        print(f"{depth:3} in flight: {done / seconds / 1e9:6.2f} GB/s of {done} bytes ({backend})")


if __name__ == "__main__":
    main()
