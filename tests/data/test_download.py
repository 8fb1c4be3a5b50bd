"""Downloads from a server on this machine: whole, resumed, cut off, wrong, and not there."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedem.core.errors import UserError
from fedem.data.download import Remote, check, digest_of, download

CONTENT = np.random.default_rng(0).bytes(700_001)
MD5 = f"md5:{hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()}"


class Server(ThreadingHTTPServer):
    """Serves CONTENT at /file.bin, after ``cuts``: lengths at which the first answers break off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cuts: list[int] = []
        self.ranges = True
        self.asked: list[str | None] = []
        self.statuses: list[int] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        if self.server.statuses:
            self.send_error(self.server.statuses.pop(0))
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        if start >= len(CONTENT):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = CONTENT[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cuts.pop(0)] if self.server.cuts else body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_file_arrives_whole(server: Server, tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    path = download(Remote(server.address, MD5), tmp_path, lambda done, total: told.append((done, total)))
    assert path == tmp_path / "file.bin"
    assert path.read_bytes() == CONTENT
    assert told[0] == (0, len(CONTENT))
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert told == sorted(told)
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


def test_a_file_that_is_there_is_not_asked_for(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(CONTENT)
    download(Remote(server.address, MD5), tmp_path)
    assert server.asked == []


def test_an_earlier_part_is_gone_on_with(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1234])
    assert download(Remote(server.address, MD5), tmp_path).read_bytes() == CONTENT
    assert server.asked == ["bytes=1234-"]


def test_a_server_without_ranges_sends_all_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1234])
    assert download(Remote(server.address, MD5), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("checksum", ["", MD5])
def test_an_answer_that_is_cut_off_is_resumed(server: Server, tmp_path: Path, checksum: str) -> None:
    server.cuts = [1000, 50_000]
    assert download(Remote(server.address, checksum), tmp_path, pause=0).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-", "bytes=51000-"]


def test_a_connection_that_keeps_breaking_leaves_the_part(server: Server, tmp_path: Path) -> None:
    server.cuts = [1000, 1000, 1000]
    with pytest.raises(UserError, match=r"cut off after 3,000 of 700,001 bytes"):
        download(Remote(server.address, MD5), tmp_path, pause=0)
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:3000]
    assert not (tmp_path / "file.bin").exists()
    assert download(Remote(server.address, MD5), tmp_path).read_bytes() == CONTENT


def test_a_part_that_was_whole_already_is_taken(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert download(Remote(server.address, MD5), tmp_path).read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT)}-"]


@pytest.mark.parametrize("left", [b"other" * 100, b"x" * (len(CONTENT) + 5)])
def test_a_part_of_another_file_is_thrown_away(server: Server, tmp_path: Path, left: bytes) -> None:
    (tmp_path / "file.bin.part").write_bytes(left)
    assert download(Remote(server.address, MD5), tmp_path, pause=0).read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_at_once(server: Server, tmp_path: Path) -> None:
    wrong = "md5:" + "0" * 32
    with pytest.raises(UserError, match=rf"its md5 is {MD5[4:]}; allowed: 0{{32}}"):
        download(Remote(server.address, wrong), tmp_path)
    assert len(server.asked) == 1
    assert not list(tmp_path.iterdir())


def test_a_file_that_the_server_has_not_is_not_asked_for_twice(server: Server, tmp_path: Path) -> None:
    server.statuses = [404]
    with pytest.raises(UserError, match="HTTP 404"):
        download(Remote(server.address), tmp_path, pause=0)
    assert len(server.asked) == 1


def test_a_server_in_trouble_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.statuses = [503, 500]
    assert download(Remote(server.address, MD5), tmp_path, pause=0).read_bytes() == CONTENT


def test_without_a_server_the_user_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/data/file.bin"
    with pytest.raises(UserError) as caught:
        download(Remote(address, MD5), tmp_path, pause=0)
    for needed in (address, "Fetch file.bin", str(tmp_path / "file.bin"), f"md5 is {MD5[4:]}", "refused"):
        assert needed in str(caught.value)


def test_a_silent_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/file.bin"
        with pytest.raises(UserError, match="timed out"):
            download(Remote(address), tmp_path, attempts=1, timeout=0.05)


def test_a_file_is_checked_by_what_was_published(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(CONTENT)
    check(path, Remote("https://example.org/file.bin", MD5))
    check(path, Remote("https://example.org/file.bin", f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"))
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match=rf"{re.escape(str(path))} is damaged or another file"):
        check(path, Remote("https://example.org/file.bin", MD5))


def test_a_folders_digest_is_that_of_its_names_and_contents(tmp_path: Path) -> None:
    def folder(name: str, **files: bytes) -> str:
        (tmp_path / name / "deep").mkdir(parents=True)
        for file, content in files.items():
            (tmp_path / name / "deep" / file).write_bytes(content)
        return digest_of(tmp_path / name)

    first = folder("a", x=b"1", y=b"2")
    assert first == folder("b", y=b"2", x=b"1")
    assert len({first, folder("c", x=b"2", y=b"1"), folder("d", x=b"1"), folder("e", x=b"1", z=b"2")}) == 4
