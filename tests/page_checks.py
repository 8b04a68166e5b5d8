"""Checks of built pages, each a function from pages to complaints, so that tests can feed them bad pages."""

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

RAW = ("np.float", "np.int", "tensor(", "{glue", "{ref}", "{numref}", "{cite", "{prf:", "{doc}", "nan ± ", "```", "$")
WIDTHS = {"desk": 1280, "phone": 400}


def pages(root: Path) -> list[Path]:
    """Every page of the book; not the builder's own index and search pages."""
    return sorted(
        p for p in root.rglob("*.html") if "_static" not in p.parts and p.name not in ("genindex.html", "search.html", "prf-prf.html")
    )


@cache
def _parsed(page: Path, stamp: float) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(), "html.parser")


def soup(page: Path) -> BeautifulSoup:
    """The parsed page; parsed once for all the links that lead to it."""
    return _parsed(page, page.stat().st_mtime)


@cache
def _anchors(page: Path, stamp: float) -> frozenset[str]:
    return frozenset(tag["id"] for tag in soup(page).find_all(id=True))


def dead_links(page: Path) -> list[str]:
    """Internal links, scripts and pictures that lead nowhere, and anchors that are not on their page."""
    found = []
    for tag in soup(page).find_all(True):
        for attribute in ("href", "src"):
            address = tag.get(attribute)
            if not address or urlsplit(address).scheme or address.startswith(("//", "#!")):
                continue
            parts = urlsplit(address)
            target = page if not parts.path else (page.parent / unquote(parts.path)).resolve()
            if not target.exists():
                found.append(f"{page.name}: {address} does not exist")
            elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in _anchors(target, target.stat().st_mtime):
                found.append(f"{page.name}: {address} has no such anchor")
    return found


def outside(page: Path) -> list[str]:
    """Scripts, styles, pictures and frames that another host would have to serve."""
    found = []
    for tag in soup(page).find_all(["script", "link", "img", "iframe", "source"]):
        address = tag.get("src") or (tag.get("href") if tag.name == "link" else None) or ""
        if (urlsplit(address).scheme in ("http", "https") or address.startswith("//")) and "canonical" not in (tag.get("rel") or []):
            found.append(f"{page.name}: <{tag.name}> loads {address}")
    return found


def alt_texts(page: Path) -> list[str]:
    """Pictures of the text without a description, or with a file name for one."""
    images = soup(page).select("main img, article img")
    bad = [img for img in images if len((img.get("alt") or "").split()) < 4]
    return [f"{page.name}: alt text {img.get('alt')!r} of {img.get('src')}" for img in bad]


def raw_text(page: Path) -> list[str]:
    """Markup or reprs that reached the reader."""
    found = []
    for tag in soup(page).select("article p, article td, article li, article figcaption, article h1, article h2"):
        if tag.find_parent(class_="cell_input") or tag.find_parent("pre"):
            continue
        text = tag.get_text()
        for code in tag.find_all("code"):
            text = text.replace(code.get_text(), "")
        found += [f"{page.name}: {word!r} in “{' '.join(text.split())[:60]}”" for word in RAW if word in text]
    return found


def tracebacks(page: Path) -> list[str]:
    """Errors and warnings of code cells that reached the page."""
    text = page.read_text()
    return [f"{page.name}: {word}" for word in ("Traceback (most recent call last)", "cell_output stderr", "Warning:") if word in text]


CHECKS = (dead_links, outside, alt_texts, raw_text, tracebacks)
LOCAL = re.compile(r"^(file|data|blob|about):")
