"""Server-sent events out of the pieces in which a stream arrives."""

from __future__ import annotations

from collections.abc import Iterator


class EventStream:
    """Puts pieces together into events; comments and other fields than ``data`` are left out.

    Lines may end with LF, CRLF or CR, and an event's data may take several lines (the HTML standard, section 9.2).
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that this piece ends.

        Args:
            piece: Bytes as they were read; need not end with a line.
        """
        text = self._rest + piece
        if b"\r" in text:
            held = text.endswith(b"\r")  # its LF may be on the way
            text = (text[:-1] if held else text).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            lines = text.split(b"\n")
            self._rest = lines.pop() + (b"\r" if held else b"")
        else:
            lines = text.split(b"\n")
            self._rest = lines.pop()
        for line in lines:
            if not line:
                if self._data:
                    data, self._data = b"\n".join(self._data), []
                    yield data
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])

    @property
    def is_between_events(self) -> bool:
        """Whether nothing of an event that has begun is still awaited."""
        return not self._rest.strip() and not self._data
