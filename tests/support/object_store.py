"""An S3 server on this machine, and a proxy before it that fails as object stores do."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUCKET = "runs"


class FaultyStore(ThreadingHTTPServer):
    """Passes requests on to the server at `target`, unless it was told to fail."""

    daemon_threads = True

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.refuse_with = 0  # status for every request; 0: none is refused
        self.held = ""  # writes of a path with this in it wait
        self.holds = threading.Event()  # set while one does
        self.go_on = threading.Event()  # ends the waiting
        self.writes: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def hold(self, part: str) -> None:
        self.holds.clear()
        self.go_on.clear()
        self.held = part

    def release(self) -> None:
        self.held = ""
        self.go_on.set()


class _Handler(BaseHTTPRequestHandler):
    server: FaultyStore
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        body, store = self._body(), self.server
        if self.command == "PUT":
            store.writes.append(self.path)
            if store.held and store.held in self.path:
                store.holds.set()
                store.go_on.wait()
        if store.refuse_with:
            return self._answer(store.refuse_with, [], b"")
        connection = http.client.HTTPConnection(*store.target)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "expect")}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        return self._answer(response.status, response.getheaders(), response.read())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        length = next((v for k, v in headers if k.lower() == "content-length"), len(body))
        self.send_header("Content-Length", str(length if self.command == "HEAD" else len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def object_store() -> Iterator[FaultyStore]:
    """A server with the bucket `BUCKET`, behind a proxy."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = FaultyStore(server.get_host_and_port())
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        connection = http.client.HTTPConnection(*proxy.target)
        connection.request("POST", "/moto-api/reset")  # its buckets are those of the process
        connection.getresponse().read()
        connection.request(
            "PUT",
            f"/{BUCKET}",
            headers={"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"},
        )
        assert connection.getresponse().status == 200
        yield proxy
    finally:
        proxy.release()
        proxy.shutdown()
        proxy.server_close()
        thread.join()
        server.stop()
