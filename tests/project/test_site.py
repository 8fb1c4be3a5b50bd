"""The documentation builds without a warning, and its pages load nothing from elsewhere."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
    pytest.importorskip(package)

pytestmark = pytest.mark.site
ROOT = Path(__file__).parents[2]
# What a browser follows when asked to; all other tags' addresses it fetches by itself.
FOLLOWED = {"a", "canonical", "next", "prev"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    return folder


class _Fetched(HTMLParser):
    """Gathers the addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if (values.get("rel") if tag == "link" else tag) not in FOLLOWED:
            self.addresses += [value for name in ("src", "srcset", "href", "data") if (value := values.get(name))]


def _fetched(page: str) -> list[str]:
    parser = _Fetched()
    parser.feed(page)
    return parser.addresses


def _text(page: Path) -> str:
    """A page's words, without tags."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page.read_text(encoding="utf-8"))).split())


def test_every_document_and_script_is_a_page(site: Path) -> None:
    documents = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    scripts = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs" / "gallery").glob("*.py")]
    assert len(documents) > 15
    assert len(scripts) >= 5
    for path in documents + scripts:
        assert (site / path.with_suffix(".html")).is_file()
    assert not (site / "hooks.py").exists()


def test_the_reference_has_the_docstrings(site: Path) -> None:
    from fedem.methods.fedem import FedEM

    methods = _text(site / "api" / "methods.html")
    assert (FedEM.__doc__ or "").splitlines()[0] in methods
    assert "fedem.methods.base.Algorithm" in (site / "api" / "methods.html").read_text(encoding="utf-8")
    package = (site / "api" / "fedem.html").read_text(encoding="utf-8")
    for name in ("train", "Federation", "Result", "Result.personalize"):
        assert f'id="fedem.{name}"' in package


def test_a_script_s_page_is_its_prose_and_its_code(site: Path) -> None:
    page = site / "gallery" / "unseen_clients.html"
    text = _text(page)
    assert "Clients unseen in training" in text
    assert text.index("holds a quarter of the clients out") < text.index("hold_out")
    assert '"""Clients' not in text
    assert 'href="gallery/unseen_clients.html"' in (site / "index.html").read_text(encoding="utf-8")


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    for path, page in pages.items():
        fetched = _fetched(page)
        assert any(address.endswith(".css") for address in fetched)
        assert not [address for address in fetched if re.match(r"(\w+:)?//", address)], path
        # The theme fetches the code that draws such diagrams where there is one.
        assert 'class="mermaid"' not in page
        assert not re.search(r":(class|data|func|meth|mod):", page), path
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", path.read_text(encoding="utf-8")), path


def test_what_counts_as_loaded() -> None:
    page = '<a href="https://a.b/"></a><link rel="canonical" href="https://a.b/"><script src="//a.b/c.js"></script>'
    assert _fetched(page + '<link rel="stylesheet" href="https://a.b/d.css">') == ["//a.b/c.js", "https://a.b/d.css"]


def test_the_code_on_the_first_page_is_the_readme_s() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), flags=re.DOTALL)
    assert block in (ROOT / "README.md").read_text()
