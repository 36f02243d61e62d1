"""The page at ``/``, for a person who looks at the server, and the episodes that it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

from policy_server.episode import EpisodeError, run_episode
from policy_server.errors import PolicyServerError
from policy_server.routes.answers import host_of, settings_of
from policy_server.security import PROTOCOL_PREFIX, key_of

router = APIRouter()

PAGE = Path(__file__).parents[1] / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_FILES = {path.name: path for path in PAGE.iterdir() if path.suffix in _TYPES}


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """Policies, live charts, a form, an episode."""
    return FileResponse(PAGE / "index.html", media_type=_TYPES[".html"], headers={"cache-control": "no-cache"})


@router.get("/page/{file}", include_in_schema=False)
async def page_file(file: Annotated[str, PathParameter(max_length=64)]) -> FileResponse:
    """The page's style and scripts."""
    path = _FILES.get(file)
    if path is None:
        raise HTTPException(404)
    return FileResponse(path, media_type=_TYPES[path.suffix], headers={"cache-control": "no-cache"})


@router.websocket("/v1/policies/{name}/episode")
async def episode(socket: WebSocket, name: str) -> None:
    """One episode of the policy's environment, step by step as JSON; it ends when the page hangs up."""
    protocols = [protocol for protocol in socket.scope["subprotocols"] if protocol.startswith(PROTOCOL_PREFIX)]
    await socket.accept(subprotocol=protocols[0] if protocols else None)
    host, settings = host_of(socket), settings_of(socket)
    try:
        seed = socket.query_params.get("seed", "0")
        if not seed.isascii() or not seed.isdecimal() or len(seed) > 9:
            raise EpisodeError(f"seed: {seed[:40]!r}, a whole number below 10^9 is expected")
        manifest = host.find(name).manifest
        await run_episode(manifest, settings, socket, seed=int(seed), key=key_of(socket.headers))
    except (EpisodeError, PolicyServerError) as error:
        await socket.send_json({"error": str(error)})
    except (WebSocketDisconnect, RuntimeError):  # the page is gone
        return
    await socket.close()
