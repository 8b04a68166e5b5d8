"""The built pages: links, anchors, outside requests, alt texts, stray markup. Run by `make test` after the build."""

import page_checks
import pytest

from lib.book.toc import chapters


def test_every_chapter_has_a_page(html_root):
    missing = [entry for entry in chapters() if not (html_root / f"{entry}.html").exists()]
    assert missing == [], "run `make book`"


@pytest.mark.parametrize("check", page_checks.CHECKS, ids=lambda f: f.__name__)
def test_pages(html_root, check):
    pages = page_checks.pages(html_root)
    assert len(pages) >= len(chapters())
    assert [complaint for page in pages for complaint in check(page)] == []
