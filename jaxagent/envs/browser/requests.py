"""What a browser asks, as a site reads it: method, path, and the fields of a query and of a form."""

from __future__ import annotations

import base64
import email.parser
import email.policy
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit


def site_of(url: str) -> str:
    """The scheme and host of an address."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def form_of(request: Mapping[str, Any]) -> tuple[str, str, dict[str, str]]:
    """Method, path and fields of a request of the DevTools protocol.

    A body that is no form, such as JSON, is the field "".
    """
    parts = urlsplit(request["url"])
    form = dict(parse_qsl(parts.query, keep_blank_values=True))
    body = b"".join(base64.b64decode(entry.get("bytes", "")) for entry in request.get("postDataEntries", ()))
    if request.get("hasPostData"):
        headers = {name.lower(): value for name, value in request["headers"].items()}
        kind = headers.get("content-type", "")
        if kind.startswith("application/x-www-form-urlencoded"):
            form |= parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)
        elif kind.startswith("multipart/form-data"):
            form |= _multipart(kind, body)
        else:
            form[""] = body.decode("utf-8", "replace")
    return request["method"], unquote(parts.path) or "/", form


def _multipart(kind: str, body: bytes) -> dict[str, str]:
    """The fields that are texts."""
    parser = email.parser.BytesParser(policy=email.policy.HTTP)
    message = parser.parsebytes(f"Content-Type: {kind}\r\n\r\n".encode() + body)
    fields = {}
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        if isinstance(name, str) and part.get_filename() is None:
            fields[name] = part.get_payload(decode=True).decode("utf-8", "replace").rstrip("\r\n")
    return fields
