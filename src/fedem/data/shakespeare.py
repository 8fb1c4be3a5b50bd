"""Shakespeare: the next character of a role's lines (McMahan and others 2017), parsed the way LEAF does.

The text is Project Gutenberg's #100 in the layout of 1994: a role's name and a full stop, indented by two spaces, start
a speech; lines indented by four go on with it; the Comedy of Errors has no indents. LEAF's rules, kept here:

- A client is a role in a play, PLAY_ROLE, the role in capitals. Works with fewer than two roles are not plays.
- Roles of fewer than three lines are dropped (the paper says two; its number of samples is LEAF's), and so are those
  whose text is no longer than a window.
- A role's lines are joined by spaces, several spaces become one, and a window slides over that text by one character.

Windows of one role overlap. So a role's text is cut in order into the parts, with a gap of a window between them: split
at random, nearly every character of the test part would stand in some training window too.

Characters are coded by their position among LEAF's 80 letters. A character that is not among them gets the code of the
last letter: LEAF looks up -1 for it, and its one-hot vector for -1 is that of the last one.

Shapes: n windows of a role, L characters of a window.
"""

import gzip
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedem.core.errors import UserError
from fedem.data.dataset import Dataset
from fedem.data.partitions import Collection, Natural, Partition, fingerprint_of
from fedem.data.samples import Pool
from fedem.data.store import Block, Public, opened, read_bytes

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
UNKNOWN = len(LETTERS) - 1
FEWEST_LINES = 3
_SPEECH = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)")
_CODES = np.full(256, UNKNOWN, dtype=np.int8)
_CODES[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))


def plays(text: str) -> list[tuple[str, dict[str, list[str]]]]:
    """Split the complete works into plays: (title, {role: its lines})."""
    found: list[tuple[str, dict[str, list[str]]]] = []
    lines = text.splitlines()
    roles: dict[str, list[str]] = {}
    speaker, flat = None, False
    for number, line in enumerate(lines):
        if "by William Shakespeare" in line:
            above = lines[max(0, number - 7) : max(0, number - 1)]  # the title is the nearest of these lines with text
            title = next((line.strip() for line in reversed(above) if line.strip()), "")
            roles, speaker, flat = defaultdict(list), None, title == "THE COMEDY OF ERRORS"
            found.append((title, roles))
        elif not found:
            continue
        elif (flat or line.startswith("  ")) and (speech := _SPEECH.match(line if flat else line[2:])):
            speaker = speech[1].upper()
            if flat and speaker.startswith("ACT "):
                speaker = None
            else:
                roles[speaker].append(speech[2])
        elif speaker and flat and line.startswith("<"):
            speaker = None  # the publisher's notice, which elsewhere is not indented
        elif speaker and (flat or line.startswith("    ")):
            roles[speaker].append(line if flat else line[4:])
    return [(title, roles) for title, roles in found if len(roles) > 1]


def encode(text: str) -> NDArray[np.int8]:
    """Code characters by their position among LETTERS."""
    points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    return _CODES[np.minimum(points, len(_CODES) - 1)]


def _text(source: Path) -> str:
    with opened(source) as files:
        names = [name for name in files if name.lower().removesuffix(".gz").endswith(".txt")]
        if len(names) != 1:
            raise UserError(f"{source} holds {len(names)} texts; allowed: one file ending in .txt or .txt.gz.")
        content = read_bytes(files, names[0])
    content = gzip.decompress(content) if names[0].lower().endswith(".gz") else content
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # older editions


@dataclass(frozen=True)
class Shakespeare(Public):
    """The next character of a role's lines.

    Attributes:
        window: L, characters that are seen before the one to predict.
        min_lines: roles of fewer lines are left out.
        split: how a role's windows become training, validation and test. "ordered" cuts its text in that order and
            leaves out a window's length between two parts, so that no two parts share a character. "random" draws
            windows, and leaks: of 99.9% of the test windows the last 25 characters stand in a training window of the
            role as well, with the character to predict after them, so that test scores may reward learning by heart.
    """

    window: int = field(default=80, metadata={"min": 1, "max": 1000})
    min_lines: int = field(default=FEWEST_LINES, metadata={"min": FEWEST_LINES})
    split: str = field(default="ordered", metadata={"choices": ("ordered", "random"), "before": "random"})
    name = "shakespeare"
    labels = tuple(LETTERS)

    @property
    def variant(self) -> str:
        return f"{self.name}-{self.window}"

    @property
    def command(self) -> str:
        return f"{super().command} --window {self.window}"

    @property
    def cut(self) -> dict[str, Any]:
        return super().cut | ({"gap": self.window} if self.split == "ordered" else {})

    def make(self, seed: int, partition: Partition | None = None, unseen: float = 0.0) -> Dataset:
        if self.split == "ordered" and not isinstance(partition or Natural(), Natural):
            said = "data.split is 'ordered', but windows dealt at random overlap those of others"
            raise UserError(f"{said}; allowed: partition.name natural, or data.split random.")
        return super().make(seed, partition, unseen)

    def read(self, source: Path) -> Iterator[Block]:
        """Read the text; roles with many lines come first, so that a minimum is a matter of where to stop."""
        roles: dict[str, list[str]] = defaultdict(list)
        for title, lines_by_role in plays(_text(source)):
            for role, lines in lines_by_role.items():
                if len(lines) >= FEWEST_LINES:
                    roles[re.sub(r"\W+", "_", f"{title}_{role}".replace(" ", "_"))] += lines
        if not roles:
            raise UserError(f"{source} has no plays in the layout of Project Gutenberg's #100 of 1994.")
        for role in sorted(roles, key=lambda role: (-len(roles[role]), role)):
            if len(codes := encode(re.sub("  +", " ", " ".join((*roles[role], ""))))) > self.window:
                windows = sliding_window_view(codes, self.window)[:-1]
                yield Block(windows, codes[self.window :], role, lines=len(roles[role]))

    def collect(self) -> Collection:
        """Open the canonical form and leave out roles of fewer than ``min_lines`` lines."""
        whole, about = self.opened()
        lines = torch.tensor(about.lines)
        stays = lines >= self.min_lines
        assert whole.owners is not None
        if bool(stays.all()):
            return whole
        if not bool(stays.any()):
            raise UserError(f"data.min_lines is {self.min_lines}; allowed: at most {lines.max()}, the longest role's.")
        end = int(stays[whole.owners].sum())
        pool, ids = Pool(*(array[:end] for array in whole.pool)), whole.ids[:end]
        owners = (stays.cumsum(0) - 1)[whole.owners[:end]]
        names = tuple(name for name, stay in zip(whole.owner_names, stays.tolist(), strict=True) if stay)
        return Collection(pool, ids, fingerprint_of(ids.numpy()), owners, names)
