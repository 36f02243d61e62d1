"""The page at ``/``: for a person who looks at the server."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

router = APIRouter()

PAGE = Path(__file__).parents[1] / "page"
_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """Policies, live charts, a form."""
    return FileResponse(PAGE / "index.html", media_type=_TYPES[".html"])
