"""The page that shows runs: one program, in three forms.

`python -m jaxagent.view` serves it, and it asks for what it shows. `report.html` has it inside, with one run's data.
It makes elements and texts, never markup of what it is given, and its policy (`POLICY`) lets nothing else run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import pathlib
from typing import Any

from jaxagent.observe.shown_episodes import embedded

FOLDER = pathlib.Path(__file__).parent
STYLES = ("uplot.css", "page.css")
SCRIPTS = ("uplot.js", "page.js", "page_curves.js", "page_episodes.js", "page_episode.js", "page_runs.js")
REST = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
POLICY = f"{REST}; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'"


def style() -> str:
    """The page's style sheet."""
    return "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in STYLES)


def script() -> str:
    """The page's program."""
    return "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)


def served() -> str:
    """The page that asks a server."""
    head = '<link rel="stylesheet" href="app.css"><script src="app.js" defer></script>'
    return _document("jaxagent", head, "")


def whole(title: str, data: Any) -> str:
    """The page with its program and data inside: it asks nobody, and nothing but its own program runs in it."""
    own_style, own_script = style(), script()
    policy = f"{REST}; script-src {_digest(own_script)}; style-src {_digest(own_style)}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}"><style>{own_style}</style>'
    body = f'<script type="application/json" id="data">{embedded(data)}</script><script>{own_script}</script>'
    return _document(title, head, body)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _document(title: str, head: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">{head}</head><body>'
        '<a class="skip" href="#main">to the content</a><header id="top"></header>'
        '<main id="main" tabindex="-1"><noscript>This page needs JavaScript.</noscript></main>'
        f'<div id="say" role="status" aria-live="polite"></div>{body}</body></html>'
    )
