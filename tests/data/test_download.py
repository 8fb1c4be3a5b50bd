"""Downloads from a server on this machine: whole, cut off, wrong, and not there."""

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
from fedem.data import DATA
from fedem.data.store import Public, Remote, check, digest_of, download, record_of

CONTENT = np.random.default_rng(0).bytes(700_001)
MD5 = f"md5:{hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()}"


class Server(ThreadingHTTPServer):
    """Serves CONTENT at /file.bin, after ``cuts``: lengths at which the first answers break off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cuts: list[int] = []
        self.asked: list[str] = []
        self.statuses: list[int] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.statuses:
            self.send_error(self.server.statuses.pop(0))
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: self.server.cuts.pop(0)] if self.server.cuts else CONTENT)

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
    path = download(Remote(server.address, MD5), tmp_path, lambda what, done, total: told.append((done, total)))
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


@pytest.mark.parametrize("left", [b"", CONTENT[:1234], b"x" * (len(CONTENT) + 5)])
def test_what_a_killed_process_left_plays_no_part(server: Server, tmp_path: Path, left: bytes) -> None:
    (tmp_path / "file.bin.part").write_bytes(left)
    assert download(Remote(server.address, MD5), tmp_path).read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


@pytest.mark.parametrize("checksum", ["", MD5])
def test_an_answer_that_is_cut_off_is_asked_for_again(server: Server, tmp_path: Path, checksum: str) -> None:
    server.cuts = [1000, 500_000]
    assert download(Remote(server.address, checksum), tmp_path, pause=0).read_bytes() == CONTENT
    assert len(server.asked) == 3


def test_a_connection_that_keeps_breaking_is_told(server: Server, tmp_path: Path) -> None:
    server.cuts = [1000, 1000, 1000]
    with pytest.raises(UserError, match=r"can't be downloaded \(.*1000 bytes read, 699001 more expected"):
        download(Remote(server.address, MD5), tmp_path, pause=0)
    assert not list(tmp_path.iterdir())
    assert download(Remote(server.address, MD5), tmp_path).read_bytes() == CONTENT


def test_the_package_is_named_when_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pooch", None)
    with pytest.raises(UserError, match=r"Downloading https://example\.org/f needs the package pooch"):
        download(Remote("https://example.org/f"), tmp_path)


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


def test_a_file_of_no_known_hash_is_held_to_its_first_use(server: Server, tmp_path: Path) -> None:
    remote = Remote(server.address)
    path = download(remote, tmp_path)
    assert record_of(path).read_text() == f"{hashlib.sha256(CONTENT).hexdigest()}  file.bin\n"
    assert download(remote, tmp_path) == path
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match=r"allowed: [0-9a-f]{64}, as at its first use, in .*file\.bin\.sha256\. If its"):
        download(remote, tmp_path)
    # Nor is another file taken for it when it is downloaded again.
    path.unlink()
    record_of(path).write_text(f"{'0' * 64}  file.bin\n")
    with pytest.raises(UserError, match=r"file\.bin\.part is damaged or another file: its sha256 is .*allowed: 0{64}"):
        download(remote, tmp_path)
    assert [left.name for left in tmp_path.iterdir()] == ["file.bin.sha256"]
    record_of(path).unlink()
    assert download(remote, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b"\n"])
def test_a_damaged_record_is_no_permission(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(CONTENT)
    record_of(path).write_bytes(damaged)
    with pytest.raises(UserError, match=r"as at its first use, in"):
        check(path, Remote("https://example.org/file.bin"))


def test_what_is_known_goes_before_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(CONTENT)
    record_of(path).write_text("0" * 64)
    check(path, Remote("https://example.org/file.bin", MD5))


def test_public_files_come_encrypted_and_are_known_by_their_hash() -> None:
    lengths = {"sha256": 64, "md5": 32}
    links = {link for kind in DATA.values() if issubclass(kind, Public) for link in kind.links}
    for link in links:
        assert link.address.startswith("https://")
        algorithm, _, digits = link.checksum.partition(":")
        assert not link.checksum or re.fullmatch(rf"[0-9a-f]{{{lengths[algorithm]}}}", digits)
    assert [link.file for link in links if not link.checksum] == ["1994-01-100.zip"]


def test_a_folders_digest_is_that_of_its_names_and_contents(tmp_path: Path) -> None:
    def folder(name: str, **files: bytes) -> str:
        (tmp_path / name / "deep").mkdir(parents=True)
        for file, content in files.items():
            (tmp_path / name / "deep" / file).write_bytes(content)
        return digest_of(tmp_path / name)

    first = folder("a", x=b"1", y=b"2")
    assert first == folder("b", y=b"2", x=b"1")
    assert len({first, folder("c", x=b"2", y=b"1"), folder("d", x=b"1"), folder("e", x=b"1", z=b"2")}) == 4
