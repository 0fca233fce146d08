"""The copy of a run folder in an object store, through fsspec: its steps, its logs, and how each is written.

A step is in the store if its manifest is, which is written last, and is good if every file agrees with the
manifest.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cyxjax.checkpoint.manifest import MANIFEST, Manifest, decode
from cyxjax.errors import CheckpointError, ConfigError
from cyxjax.redaction import describe
from cyxjax.run_folder import CHECKPOINTS

_WITH_BUCKETS = ("s3:", "s3a:", "gs:", "gcs:")  # in these stores a write creates no bucket


class RemoteRun:
    """The copy at `url`, whose files have the names that they have in a run folder. Methods raise what the
    store raises.

    Raises: ConfigError if no library for `url` is installed.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            import fsspec

            makes_folders = {"auto_mkdir": True} if url.startswith("file:") else {}
            self._store, root = fsspec.core.url_to_fs(url, **makes_folders)
        except (ImportError, ValueError) as err:
            extra = "gcs" if url.startswith(("gs:", "gcs:")) else "s3"
            raise ConfigError(
                f"mirror={url}: {describe(err)}. HINT: pip install 'cyxjax[{extra}]'", key="mirror"
            ) from None
        self._root = root.rstrip("/")

    def check_bucket(self) -> None:
        """Raises: ConfigError if the bucket does not exist; other errors are left to later calls."""
        bucket = self._root.partition("/")[0]
        try:
            self._store.ls(bucket, detail=False)
        except FileNotFoundError as err:
            if self._url.startswith(_WITH_BUCKETS):
                raise ConfigError(
                    f"mirror={self._url}: bucket {bucket!r} does not exist, so the run would have no copy. "
                    "HINT: create it, or check its name and AWS_ENDPOINT_URL.",
                    key="mirror",
                ) from err
        except Exception:  # a writable bucket may not allow listing
            return

    def manifests(self) -> list[Manifest]:
        """The readable manifests, newest first. Raises: ConfigError like `check_bucket`."""
        found = []
        for path in self._step_paths():
            with suppress(FileNotFoundError, CheckpointError):
                found.append(decode(self._store.cat_file(f"{path}/{MANIFEST}")))
        return sorted(found, key=lambda manifest: manifest.created_unix_s, reverse=True)

    def _step_paths(self) -> list[str]:
        self._store.invalidate_cache()
        try:
            names = self._store.ls(f"{self._root}/{CHECKPOINTS}", detail=False)
        except FileNotFoundError:
            self.check_bucket()
            return []
        return [name for name in names if name.rpartition("/")[2].startswith("step_")]

    def get_file(self, name: str, target: Path, alive: Callable[[], None]) -> None:
        """Downloads a file; `alive` is called for each part that arrives."""
        from fsspec.callbacks import Callback

        arriving = Callback(hooks={"alive": lambda *_, **__: alive()})
        alive()  # a store that is a folder reports nothing while it copies
        self._store.get_file(f"{self._root}/{name}", str(target), callback=arriving)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None without one."""
        try:
            return bytes(self._store.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def put_file(self, path: Path, name: str, moved: Callable[[int], None]) -> None:
        """Uploads a file as `name`, which is there completely, or as it was before.

        moved: called with the number of bytes that have arrived.
        """
        from fsspec.callbacks import Callback

        remote = f"{self._root}/{name}"
        # An object store replaces an object at once; a folder truncates the file that it copies over.
        part = f"{remote}.part" if getattr(self._store, "local_file", False) else remote
        hooks = {"moved": lambda size, done, **_: moved(done)}
        self._store.put_file(str(path), part, callback=Callback(hooks=hooks))
        if part != remote:
            self._store.mv(part, remote)

    def drop_manifest(self, folder: str) -> None:
        """Makes the step in `folder` no longer part of the copy."""
        with suppress(FileNotFoundError):
            self._store.rm_file(f"{self._root}/{folder}/{MANIFEST}")

    def drop(self, folder: str) -> None:
        """Removes the step in `folder`."""
        self.drop_manifest(folder)
        with suppress(FileNotFoundError):
            self._store.rm(f"{self._root}/{folder}", recursive=True)
