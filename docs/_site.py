"""What the documentation site needs beyond docs/: the documents at the top of the repository, and links out of docs/.

A link to a file that is no page, such as a source file, leads to the repository where `repo_url` of mkdocs.yml is set;
elsewhere only its text stays.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

TOP = {f"{name}.md": f"{name}.md" for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY")}
"""Document at the top of the repository → page of the site."""

SOUGHT = {
    "explain.md": 4.0,
    "install.md": 4.0,
    "isolation.md": 2.0,
    "judge.md": 2.0,
    "pass.md": 2.0,
    "measurements/": 0.2,
}
"""Page, or folder, → how much more than others it counts in a search."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the documents at the top."""
    for source, page in TOP.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(text: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write links as the site needs them, but what is fenced, and say how much the page counts in a search."""
    uri = page.file.src_uri
    page.meta["search"] = {"boost": next((boost for at, boost in SOUGHT.items() if uri.startswith(at)), 1.0)}
    source = next((top for top, at in TOP.items() if at == uri), f"docs/{uri}")

    def link(match: re.Match[str]) -> str:
        image, label, path, anchor = match[1], match[2], match[3], match[4] or ""
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        inside = TOP.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(inside) or files.get_file_from_path(f"{inside}/README.md"):
            inside = inside if files.get_file_from_path(inside) else f"{inside}/README.md"
            return f"{image}[{label}]({posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{anchor})"
        if not (ROOT / target).exists():
            return match[0]  # mkdocs warns
        return f"[{label}]({config.repo_url.rstrip('/')}/blob/main/{target})" if config.repo_url else label

    parts = _FENCED.split(text)
    return "".join(part if place % 2 else _LINK.sub(link, part) for place, part in enumerate(parts))
