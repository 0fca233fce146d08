"""An S3 server on this machine that fails as object stores do."""

import io
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib import request

BUCKET = "runs"
_SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"}


class FaultyStore:
    """WSGI application of the server: passes requests on to moto unless it is set to fail."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._moto = DomainDispatcherApplication(create_backend_app)
        self.url = ""
        self.refuse_with = 0  # status for every request; 0: none is refused
        self.held = ""  # writes to a path that contains this text wait
        self.holds = threading.Event()  # set while a write waits
        self.go_on = threading.Event()  # lets waiting writes continue
        self.writes: list[str] = []

    def __call__(self, environ: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if environ["REQUEST_METHOD"] == "PUT":
            self.writes.append(environ["PATH_INFO"])
            if self.held and self.held in environ["PATH_INFO"]:
                self.holds.set()
                self.go_on.wait()
        if self.refuse_with:
            respond(f"{self.refuse_with} refused", [])
            return [b""]
        return self._moto({**environ, "wsgi.input": io.BytesIO(body)}, respond)


@contextmanager
def object_store() -> Iterator[FaultyStore]:
    """A server with the bucket `BUCKET`."""
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import make_server

    store = FaultyStore()
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=MotoRequestHandler)
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        # moto's buckets are global to the process
        for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
            request.urlopen(request.Request(store.url + path, method=method, headers=_SIGNED)).close()
        store.writes.clear()
        yield store
    finally:
        store.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
