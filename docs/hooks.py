"""Changes that only the site needs: pages of the gallery's scripts, no Sphinx roles, comments that document fields."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from griffe import Attribute, Docstring, Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# Docstrings say :class:`~fedem.data.files.FromFile`; the tilde asks for the last part of the name only.
_ROLE = re.compile(r":(?:class|data|func|meth|mod):<code>(~?)([\w.]+)</code>")
# The comment behind a field, which is its documentation; what is said to a tool begins with its name and a colon.
_COMMENT = re.compile(r"  # (?![a-z]+:)(.+)$")
_SCRIPT = re.compile(r"\(gallery/(\w+)\.py\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page beside each script."""
    for script in sorted(Path(config.docs_dir, "gallery").glob("*.py")):
        files.append(File.generated(config, f"gallery/{script.stem}.md", content=as_page(script)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to scripts at their pages; in the repository they must point at the scripts."""
    return _SCRIPT.sub(r"(gallery/\1.md)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Replace a role by the name of its target, as code."""
    return _ROLE.sub(lambda role: f"<code>{role[2].rpartition('.')[2] if role[1] else role[2]}</code>", html)


class TrailingComments(Extension):
    """Documents a field without a docstring by the comment behind it."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Read the comment off the source."""
        if attr.docstring is None and (comment := _COMMENT.search(attr.source)):
            attr.docstring = Docstring(comment[1], lineno=attr.endlineno, parent=attr)


def as_page(script: Path) -> str:
    """Return a script as Markdown: the first line of the docstring is the title, the rest is the text."""
    source = script.read_text(encoding="utf-8")
    module = ast.parse(source)
    title, _, prose = (ast.get_docstring(module) or "").partition("\n")
    code = "\n".join(source.splitlines()[module.body[0].end_lineno :]).strip()
    return f"# {title.rstrip('.')}\n\n{prose.strip()}\n\n[{script.name}]({script.name})\n\n```python\n{code}\n```\n"
