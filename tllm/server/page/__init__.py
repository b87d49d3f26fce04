"""The page of a server, `GET /tllm`: three files, which ask the server's other routes.

The files hold nothing secret. What they ask needs the keys that the routes need; the page has
fields for them.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

_FOLDER = Path(__file__).parent
_HEADERS = {
    # Nothing from elsewhere, and nowhere else to send a key to.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    "'unsafe-inline'; connect-src 'self'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

page_router = APIRouter(include_in_schema=False)


@page_router.get("/tllm")
async def page() -> FileResponse:
    return FileResponse(_FOLDER / "index.html", headers=_HEADERS)


@page_router.get("/tllm/page.js")
async def page_script() -> FileResponse:
    """What it does."""
    return FileResponse(_FOLDER / "page.js", media_type="text/javascript", headers=_HEADERS)


@page_router.get("/tllm/page.css")
async def page_style() -> FileResponse:
    """How it looks."""
    return FileResponse(_FOLDER / "page.css", media_type="text/css", headers=_HEADERS)
