# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A web application, as WSGI and as ASGI: /small, /large, and /hash, which answers with the hash of
# what it was sent.
import hashlib

SMALL = b"x" * 612


def large():
    with open("large", "rb") as file:
        return file.read()


def wsgi(environ, start_response):
    path = environ["PATH_INFO"]
    if path == "/hash":
        sent = environ["wsgi.input"].read()
        body = hashlib.sha256(sent).hexdigest().encode()
    else:
        body = large() if path == "/large" else SMALL
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]


async def asgi(scope, receive, send):
    if scope["type"] != "http":
        return
    path = scope["path"]
    if path == "/hash":
        sent, more = hashlib.sha256(), True
        while more:
            message = await receive()
            sent.update(message.get("body", b""))
            more = message.get("more_body", False)
        body = sent.hexdigest().encode()
    else:
        body = large() if path == "/large" else SMALL
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
