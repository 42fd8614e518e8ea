"""Real files made wrong: mutants of bytes, and of the JSON that is in them, drawn from a seed."""

import json
import random
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
ODD_NUMBERS = (
    b"-1",
    b"0",
    b"1e999",
    b"-0.0",
    b"NaN",
    b"Infinity",
    b"1e-400",
    b"0.1",
    b"2147483648",
    b"18446744073709551616",
    b"9" * 400,
    b"9" * 5000,
)
DEEP = "lists in lists"
ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 0.5, 2**31, 2**63, 2**64, 10**400, 1e308, float("nan"), float("-inf"), "", "x", "\x00", "\ud800",
    "\ufeff", "9" * 5000, "k" * 70_000, "../../etc", "http://[", [], [None], {}, {"": 0},
    [[]], [5], [{"a": 1}], [float("nan")], DEEP, [DEEP],
)  # fmt: skip
ODD_BYTES = (
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc0\xaf", b"\r", b"\n", b"\n\n", b"\x0c", b"\x1c", b"\x85", b"\xe2\x80\xa8",
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"&a [*a]", b"!!python/name:os.system", b"\\ud800", b"{%", b"{{",
)  # fmt: skip
DEPTHS = (30, 200, 900, 1100, 3000, 100_000)
MOST_BYTES = 1 << 20


def mutant(seed: bytes, draw: random.Random) -> bytes:
    """One to four changes of a seed file; every thirtieth is the seed itself."""
    found = seed
    for _ in range(draw.choice((0, *[1] * 15, *[2] * 9, 3, 3, 3, 4, 4))):
        found = draw.choice((_tree, _tree, _tree, _number, _flip, _cut, _repeat, _swap, _insert))(found, draw)
    return found[:MOST_BYTES]


def _tree(found: bytes, draw: random.Random) -> bytes:
    """One place of a JSON value, the file's or a line's, holds something else."""
    lines, at = [found], 0
    try:
        tree = json.loads(found)
    except (ValueError, RecursionError):
        lines = found.split(b"\n")
        at = draw.randrange(len(lines))
        start = lines[at].find(b"{")
        before, text = lines[at][: max(start, 0)], lines[at][max(start, 0) :]
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            return _insert(found, draw)
        lines[at] = before
    else:
        lines[at] = b""
    try:
        depth = draw.choice(DEPTHS)
        deep = b"[" * depth + b"]" * depth if draw.random() < 0.5 else b'{"a":' * depth + b"1" + b"}" * depth
        lines[at] += json.dumps(_changed([tree], draw)[0]).encode().replace(json.dumps(DEEP).encode(), deep)
    except (ValueError, RecursionError):
        return found
    return b"\n".join(lines)


def _changed(tree: list[Any], draw: random.Random) -> list[Any]:
    node: Any = tree
    while True:
        key = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
        if isinstance(node[key], dict | list) and node[key] and draw.random() < 0.85:
            node = node[key]
            continue
        break
    match draw.randrange(6):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[draw.choice(("", "k" * 70_000, "\x00", "\ud800", "__class__", f"{key}x"))] = node.pop(key)
        case 1 | 2:
            node[key] = [node[key]] * (draw.choice((2, 3000)) if not isinstance(node[key], dict | list) else 1)
        case 3:
            node[key] = str(node[key])[:10_000] if draw.random() < 0.5 else {"a": node[key]}
        case _:
            node[key] = draw.choice(ODD_VALUES)
    return tree if tree else [None]


def _number(found: bytes, draw: random.Random) -> bytes:
    places = list(NUMBER.finditer(found[:100_000]))
    if not places:
        return _flip(found, draw)
    place = draw.choice(places)
    return found[: place.start()] + draw.choice(ODD_NUMBERS) + found[place.end() :]


def _span(found: bytes, draw: random.Random, most: int = 64) -> tuple[int, int]:
    start = draw.randrange(len(found) + 1)
    return start, min(len(found), start + draw.randrange(most))


def _flip(found: bytes, draw: random.Random) -> bytes:
    changed = bytearray(found or b"\x00")
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(found: bytes, draw: random.Random) -> bytes:
    start, end = _span(found, draw)
    return draw.choice((found[:start], found[start:], found[:start] + found[end:]))


def _repeat(found: bytes, draw: random.Random) -> bytes:
    start, end = _span(found, draw)
    return found[:end] + found[start:end] * draw.choice((1, 2, 100)) + found[end:]


def _swap(found: bytes, draw: random.Random) -> bytes:
    (start, end), at = _span(found, draw), draw.randrange(len(found) + 1)
    return found[:at] + found[start:end] + found[at:]


def _insert(found: bytes, draw: random.Random) -> bytes:
    deep = draw.choice((b"[", b'{"a":', b"(", b"- ")) * draw.choice(DEPTHS)
    at = draw.randrange(len(found) + 1)
    return found[:at] + draw.choice((*ODD_BYTES, deep)) + found[at:]


@contextmanager
def memory_grown() -> Iterator[Callable[[], int]]:
    """By how many bytes the most memory that this process ever held has grown since."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield lambda: 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
