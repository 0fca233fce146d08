"""Real sockets that do a group harm: a server without the token, a flood of clients."""

import contextlib
import json
import selectors
import socket
import threading

from cyxjax.launch.group import ports, protocol


class Impostor:
    """Listens where a rank looks for its group, without the token; `received` is all that clients sent.

    answer: (client's first message) -> what it answers to it.
    """

    def __init__(self, answer):
        self.received: list[bytes] = []
        self.listener = ports.listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self._answer = answer
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):  # the test is over
            while True:
                connection, _ = self.listener.accept()
                with connection:
                    connection.settimeout(5)
                    connection.sendall(protocol.encode({"cyxjax": protocol.PROTOCOL, "nonce": "5" * 32}))
                    self.received.append(connection.recv(65_536))
                    connection.sendall(self._answer(json.loads(self.received[-1])))
                    while data := connection.recv(65_536):
                        self.received.append(data)


class Flood:
    """So many clients of one address that prove nothing and connect again as soon as they are dropped."""

    def __init__(self, port, number, address):
        self._where, self._address, self._over = ("127.0.0.1", port), address, threading.Event()
        self._selector = selectors.DefaultSelector()
        for _ in range(number):
            self._connect()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _connect(self):
        knock = socket.socket()
        knock.bind((self._address, 0))
        knock.setblocking(False)
        knock.connect_ex(self._where)
        self._selector.register(knock, selectors.EVENT_READ)

    def _run(self):
        while not self._over.is_set():
            for key, _ in self._selector.select(0.1):
                try:
                    dropped = not key.fileobj.recv(4096)
                except OSError:
                    dropped = True
                if dropped:
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()
                    self._connect()

    def close(self):
        self._over.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()
