"""How valid inputs are damaged, by somebody who knows how they are built; everything is drawn from a seed."""

from __future__ import annotations

import copy
import io
import json
import math
import struct
import tomllib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

Draw = np.random.Generator
Damage = Callable[[bytes, Draw], bytes]
T = TypeVar("T")

# What may stand in the place of any value.
OTHERS: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 2**31, 2**63 - 1, 2**63, 10**11, 10**30, 1e308, -0.5, 1e-320, math.nan, math.inf,
    "", "nan", "-1", "../../x", "/etc/hostname", "a/b\0c", "\ud800", "x" * 5000, "a\nb", "ü", "=1+1",
    [], ["x"], [[1], None], [0] * 300, {}, {"x": 1}, {"": None},
)  # fmt: skip
# Texts that no writer of ours would write.
TRICKS: tuple[bytes, ...] = (
    b"", b" ", b"null", b"[]", b"{}", b'"x"', b"0", b"-", b"{", b"[1,", b"\xef\xbb\xbf{}", b"\xff\xfe{\0}\0",
    b"[" * 50_000, b'{"a":' * 50_000, b"9" * 20_000, b"1e999", b"NaN", b"\0" * 100, b"// x\n{}",
    b"a = " + b"[" * 50_000, b"a = " + b"9" * 20_000, b"[a]\n[a]\n",
)  # fmt: skip


def pick(draw: Draw, options: Sequence[T]) -> T:
    """Draw one of some options."""
    return options[int(draw.integers(len(options)))]


def flipped(content: bytes, draw: Draw) -> bytes:
    """Change some bytes, cut some off, put some in, or repeat, swap or leave out a block."""
    changed = bytearray(content)
    for _ in range(int(draw.integers(1, 4))):
        if not changed:
            return bytes(draw.bytes(4))
        # Headers and footers say most.
        size, near = len(changed), min(80, len(changed))
        place = pick(draw, [int(draw.integers(size)), int(draw.integers(near)), size - 1 - int(draw.integers(near))])
        length = int(draw.integers(1, max(2, min(64, size - place + 1))))
        match int(draw.integers(9)):
            case 0 | 1 | 2:
                changed[place] ^= 1 << int(draw.integers(8))
            case 3:
                changed[place] = pick(draw, [0, 255, int(draw.integers(256))])
            case 4:
                changed = changed[:place]
            case 5:
                changed[place:place] = draw.bytes(int(draw.integers(1, 9)))
            case 6:
                changed[place:place] = changed[place : place + length]
            case 7:
                del changed[place : place + length]
            case _:
                changed[place : place + length] = bytes(length)
    return bytes(changed)


# --- trees of tables and lists, as JSON and TOML have them


def places(tree: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a tree of dictionaries and lists."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*here, key)
        yield from places(value, (*here, key))


def changed_tree(tree: Any, draw: Draw, others: Sequence[Any] = OTHERS) -> Any:
    """The tree with one to three values replaced, moved, removed, added, nested or pushed to their limits."""
    changed = copy.deepcopy(tree)
    for _ in range(pick(draw, (1, 1, 1, 2, 3))):
        found = list(places(changed))
        if not found:
            return pick(draw, others)
        # Large lists would be nearly all there is: a place is drawn by its depth first.
        depth = int(draw.integers(1, max(map(len, found)) + 1))
        *above, last = pick(draw, [place for place in found if len(place) == depth])
        parent = changed
        for key in above:
            parent = parent[key]
        value = parent[last]
        match int(draw.integers(9)):
            case 0:
                del parent[last]
            case 1 if isinstance(parent, dict):
                parent[str(pick(draw, ("x", "", "../x", f"{last}2", "__class__", "\0", "ü")))] = value
            case 1 | 2 if isinstance(parent, list):
                parent.insert(int(draw.integers(len(parent) + 1)), value)
            case 3:  # what stands elsewhere, and is valid there
                other = changed
                for key in pick(draw, found):
                    if not isinstance(other, dict | list) or not (isinstance(other, dict) or key < len(other)):
                        break
                    if isinstance(other, dict) and key not in other:
                        break
                    other = other[key]
                parent[last] = copy.deepcopy(other)
            case 4:
                parent[last] = nested(value, pick(draw, (1, 5, 70, 150)), draw)
            case 5 | 6 if isinstance(value, int | float) and not isinstance(value, bool):
                parent[last] = pick(
                    draw, (value + 1, value - 1, -value, float(value), value * 10**6, str(value), [value])
                )
            case 5 | 6 if isinstance(value, str):
                parent[last] = pick(draw, (value.upper(), value[:-1], value + " ", value * 2, [value], f"../{value}"))
            case 5 | 6 if isinstance(value, list):
                parent[last] = pick(draw, (value[:-1], value[::-1], value * 2, value[1:], [value]))
            case _:
                parent[last] = copy.deepcopy(pick(draw, others))
    return changed


def nested(value: Any, depth: int, draw: Draw) -> Any:
    for _ in range(depth):
        value = [value] if draw.random() < 0.5 else {"x": value}
    return value


def damaged_json(content: bytes, draw: Draw) -> bytes:
    """A file of JSON whose tree, or whose text, is damaged."""
    chance = draw.random()
    if chance < 0.03:
        return pick(draw, TRICKS)
    if chance < 0.2:
        return flipped(content, draw)
    text = json.dumps(changed_tree(json.loads(content), draw))
    if chance < 0.25 and '"' in text:  # a key twice
        text = text.replace("{", '{"round": 1, "round": 2, ', 1)
    return text.encode()


def damaged_lines(content: bytes, draw: Draw) -> bytes:
    """A file of lines of JSON, some of them damaged, repeated, swapped or gone."""
    lines = content.splitlines(keepends=True)
    for _ in range(int(draw.integers(1, 4))):
        if not lines:
            break
        place = int(draw.integers(len(lines)))
        match int(draw.integers(6)):
            case 0:
                del lines[place]
            case 1:
                lines.insert(int(draw.integers(len(lines) + 1)), lines[place])
            case 2:
                lines[place] = flipped(lines[place], draw)
            case 3:
                lines[place] = pick(draw, TRICKS)[:10_000] + b"\n"
            case _:
                try:
                    tree = json.loads(lines[place])
                except (ValueError, RecursionError):  # damaged before
                    continue
                lines[place] = json.dumps(changed_tree(tree, draw)).encode() + b"\n"
    return flipped(b"".join(lines), draw) if draw.random() < 0.1 else b"".join(lines)


def toml(value: Any) -> str:
    """Write a value as TOML, with tables inline; what TOML does not know becomes what looks most like it."""
    match value:
        case None:
            return "nan"
        case bool():
            return str(value).lower()
        case float():
            return repr(value)
        case int():
            return str(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            return f"{{{', '.join(f'{toml(str(key))} = {toml(item)}' for key, item in value.items())}}}"
        case _:
            return f"[{', '.join(map(toml, value))}]"


def damaged_toml(tree: Any, draw: Draw) -> bytes:
    """A file of TOML from a damaged tree, its tables in sections or inline; or damaged itself."""
    chance = draw.random()
    if chance < 0.03:
        return pick(draw, TRICKS)
    changed = tree if chance < 0.25 else changed_tree(tree, draw)
    lines, inline = [], draw.random() < 0.3
    for key, value in changed.items() if isinstance(changed, dict) else ():
        if isinstance(value, dict) and not inline:
            lines += [f"[{toml(str(key))}]", *(f"{toml(str(name))} = {toml(item)}" for name, item in value.items())]
        else:
            lines.insert(0, f"{toml(str(key))} = {toml(value)}")
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return flipped(text, draw) if chance < 0.25 else text


def damaged_toml_text(content: bytes, draw: Draw) -> bytes:
    """The same for a file that is there."""
    return damaged_toml(tomllib.loads(content.decode()), draw)


# --- tables of cells

CELLS = (
    b"", b"\0", b'"', b'""', b"\xff", b"\xc3", b"1e400", b"-inf", b"nan", b"\r", b"\n", b",,", b"=1+1", b"x" * 3000,
    "ü".encode(), "ü".encode("cp1252"), b"9" * 400, b"1_0", b"2024-13-45", b"2024-05-31", b"0x10", b"'", b"\t", b";",
    b"-1", b"1e308", b"true", b"../../x",
)  # fmt: skip


def damaged_cells(content: bytes, draw: Draw, separator: bytes = b",") -> bytes:
    """A table of text with other cells, more of them or fewer, lines that are repeated or gone."""
    rows = [line.split(separator) for line in content.splitlines()]
    for _ in range(int(draw.integers(0, 4))):
        if not rows:
            break
        # Every other time it is the header.
        place = 0 if draw.random() < 0.3 else int(draw.integers(len(rows)))
        row = rows[place]
        match int(draw.integers(7)):
            case 0 if row:
                row.pop(int(draw.integers(len(row))))
            case 1:
                row.insert(int(draw.integers(len(row) + 1)), pick(draw, CELLS))
            case 2:
                rows.insert(int(draw.integers(len(rows) + 1)), list(row))
            case 3:
                del rows[place]
            case _ if row:
                row[int(draw.integers(len(row)))] = pick(draw, CELLS)
    ending = pick(draw, (b"\n", b"\n", b"\n", b"\r\n", b"\r"))
    text = ending.join(map(separator.join, rows)) + ending
    text = pick(draw, (b"", b"", b"", b"", b"\xef\xbb\xbf", b"\xff\xfe")) + text
    if draw.random() < 0.05:
        text = text.decode("latin-1").encode("utf-16")
    return flipped(text, draw) if draw.random() < 0.2 else text


# --- arrays

DTYPES = (
    "<f8", "<f4", "<i8", "|u1", "<u8", "<U5", "|S3", "|b1", "<c16", "<M8[s]", "<m8[ns]", "|O", "|V4", "<f2", ">f8",
    "|V0", "<U0", ">i8", "<i2",
)  # fmt: skip
SHAPES = (
    "(12, 2)", "(12,)", "()", "(0, 2)", "(12, 0)", "(-12, -2)", f"({10**15}, 4)", f"({10**30},)", "(12, 2, 2, 2)", "12",
)  # fmt: skip
DESCRS = ("'<f8'", "'|O'", "'<f4'", "'<x9'", "[('a', '<f8')]", "'<U1000000000'", "None", "''", "'<i8'", "0", "'|u1'")


def saved(array: Any) -> bytes:
    """An array as numpy writes it."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def damaged_array(array: np.ndarray[Any, Any], draw: Draw) -> bytes:
    """An array of another type, shape or content, with a header that lies, or with damaged bytes."""
    match int(draw.integers(6)):
        case 0:
            return flipped(saved(array), draw)
        case 1:
            dtype = np.dtype(pick(draw, DTYPES))
            if dtype.kind in "VMm":
                return saved(np.zeros(array.shape, dtype))
            with np.errstate(all="ignore"):
                return saved(array.astype(dtype) if array.dtype.kind in "biuf" else np.zeros(array.shape, dtype))
        case 2:
            again = pick(draw, (array[:-1], array[:0], array.T, array[None], array.reshape(-1), array[..., None]))
            return saved(again)
        case 3:
            header = f"{{'descr': {pick(draw, DESCRS)}, 'fortran_order': {pick(draw, ('True', 'False', '2'))}, "
            header += f"'shape': {pick(draw, SHAPES)}, }}\n"
            header = header if draw.random() < 0.9 else header[: int(draw.integers(len(header)))]
            version = bytes(pick(draw, ([1, 0], [2, 0], [3, 0], [9, 9])))
            length = struct.pack("<H" if version[0] == 1 else "<I", len(header))
            return b"\x93NUMPY" + version + length + header.encode() + array.tobytes()
        case _:
            changed = array.copy()
            if changed.size and changed.dtype.kind in "biuf":
                worst = (-1, 0, 1, 2, 127, 2**62, math.nan, math.inf, -math.inf, 1e300)
                with np.errstate(all="ignore"):
                    values = np.array([pick(draw, worst)], dtype=np.float64).astype(changed.dtype)
                changed.reshape(-1)[int(draw.integers(changed.size))] = values[0]
            return saved(changed)


# --- tensor files: eight bytes of length, a header of JSON, numbers


def damaged_tensors(content: bytes, draw: Draw) -> bytes:
    """A safetensors file whose header, numbers or bytes are damaged."""
    (length,) = struct.unpack("<Q", content[:8])
    header, numbers = json.loads(content[8 : 8 + length]), content[8 + length :]
    match int(draw.integers(8)):
        case 0 | 1:
            return flipped(content, draw)
        case 2 | 3:
            header = changed_tree(header, draw)
        case 4:  # another leaf's name, type or shape
            entry = pick(draw, [name for name in header if name != "__metadata__"] or [""])
            if entry in header:
                value = header.pop(entry)
                kinds, shape = ("F64", "F32", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "C64", "X"), value["shape"]
                shapes = (shape, shape[::-1], [math.prod(shape)], [])
                value |= pick(draw, ({}, {"dtype": pick(draw, kinds)}, {"shape": pick(draw, shapes)}))
                header[pick(draw, (entry, f"{entry}2", entry.upper(), "../x", ""))] = value
        case 5:
            return struct.pack("<Q", pick(draw, (0, length + 1, length - 1, 2**63, 2**32, 10**8))) + content[8:]
        case _:  # numbers that are none
            changed = bytearray(numbers)
            for _ in range(int(draw.integers(1, 6))):
                place = int(draw.integers(max(1, len(changed) // 4))) * 4
                changed[place : place + 4] = struct.pack("<f", pick(draw, (math.nan, math.inf, -1e38, 1e38, 0.0, -1.0)))
            numbers = bytes(changed[: len(numbers)])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + numbers
