"""Sphinx extension: the built pages ask nothing of the network and raise no script error."""

import shutil
from importlib.util import find_spec
from pathlib import Path

MATHJAX = "mathjax/tex-svg-full.js"  # the full bundle: the plain one fetches extensions and dies without a network


def _is_thebe(item) -> bool:
    words = str(getattr(item, "filename", item) or "") + str(getattr(item, "attributes", {}).get("body", ""))
    return "thebe" in words.lower()


def drop_thebe(app, pagename, templatename, context, doctree) -> None:
    """Remove the live-code scripts that jupyter-book always adds: they name a host, and a second copy is an error."""
    for what in ("script_files", "css_files"):
        files = context.get(what, [])
        files[:] = [item for item in files if not _is_thebe(item)]
    context["default_mode"] = "light"  # figures are drawn on white


def copy_mathjax(app, exception) -> None:
    """Put MathJax beside the pages."""
    if exception or app.builder.name != "html":
        return
    spec = find_spec("sphinx-mathjax-offline")  # hyphens: it cannot be imported by a statement
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("sphinx-mathjax-offline is not installed; run `make setup`.")
    found = sorted(Path(spec.submodule_search_locations[0]).rglob("tex-svg-full.js"))
    if not found:
        raise RuntimeError("sphinx-mathjax-offline holds no tex-svg-full.js; the pinned version does.")
    target = Path(app.outdir) / "_static" / MATHJAX
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found[0], target)


def setup(app):
    """Register with Sphinx."""
    app.config.mathjax_path = MATHJAX
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
