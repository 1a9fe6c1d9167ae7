"""The pieces in which a layer's keys and values come up the link, for the GPU to attend to them."""

from __future__ import annotations

from collections.abc import Iterator

# A piece has so many bytes at most (but for a single head of more), and there is room for so many.
# A millisecond of a PCIe 5 link: long beside what issuing one takes, and short beside a layer of a
# long context, whose last piece's attention is soon done.
KV_PIECE, KV_PIECES = 64 << 20, 2

Piece = tuple[slice, slice]  # rows, KV heads


def pieces_of(rows: int, heads: int, head_bytes: int) -> list[Piece]:
    """All pieces of a layer, in order: each is some whole sequences or, where one sequence takes
    more than KV_PIECE, some of its heads. `head_bytes`: of one head of one sequence.
    """
    most_rows, most_heads = _most(heads, head_bytes)
    return [
        (slice(*row), slice(*head))
        for row in evenly(0, rows, most_rows)
        for head in evenly(0, heads, most_heads)
    ]


def piece_count(rows: int, heads: int, head_bytes: int) -> int:
    """The number of these pieces."""
    most_rows, most_heads = _most(heads, head_bytes)
    return -(-rows // most_rows) * -(-heads // most_heads)


def largest_piece(rows: int, heads: int, head_bytes: int) -> tuple[int, int]:
    """Rows and heads of the largest of them; there is at least one row and one head."""
    most_rows, most_heads = _most(heads, head_bytes)
    return _largest(rows, most_rows), _largest(heads, most_heads)


def piece_limit(rows: int, heads: int, head_bytes: int) -> int:
    """A bound for rows x heads of the largest of them. It never falls when rows are added, while
    the largest itself may, as pieces are of even sizes.
    """
    most_rows, most_heads = _most(heads, head_bytes)
    return min(rows, most_rows) * min(heads, most_heads)


def _most(heads: int, head_bytes: int) -> tuple[int, int]:
    """Rows and heads that fit a piece."""
    rows = KV_PIECE // (heads * head_bytes)
    return (rows, heads) if rows else (1, max(1, KV_PIECE // head_bytes))


def evenly(first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """Spans of `most` at most, of sizes that differ by one at most."""
    count = -(-(last - first) // most)
    for i in range(count):
        size = last - first
        yield first + i * size // count, first + (i + 1) * size // count


def _largest(size: int, most: int) -> int:
    """The largest of such spans."""
    count = -(-size // most)
    return -(-size // count)
