"""Everything we use of jax and jaxlib that is not public, in one place, with one contract test.

Written against jax and jaxlib 0.10.2 and 0.11.2. Where a private name is missing, the public way is taken:
rank 0 hosts the coordination service itself, and gloo chooses its own address.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from cyxjax.errors import GroupError

# A missed heartbeat aborts a rank without a message: a last resort, and a poor criterion, since a suspended
# job (SIGSTOP, Ctrl-Z, a queue that pauses it) sends none: with 30 s a suspension of 45 s ended the ranks.
# The group's server notices a host that vanished within 10 s, gloo a process that died at once.
HEARTBEAT_S = 600
START_S = 120
SHUTDOWN_S = 10


def refuse_started_backend(asked: str) -> None:
    """Raises GroupError if jax has started its devices: it would ignore what is `asked` for."""
    if backend_runs():
        raise GroupError(
            f"{asked}: jax has started its devices already. "
            "HINT: call cyxjax.distributed.init() first, before any array is made or jax.devices() is called."
        )


def backend_runs() -> bool:
    """True when jax has started its devices, and no longer reads its environment variables."""
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def can_serve() -> bool:
    """True when this jaxlib lets a process without jax host the coordination service (imports jaxlib)."""
    try:
        from jaxlib import _jax
    except ImportError:
        return False
    return hasattr(_jax, "get_distributed_runtime_service")


def serve(address: str, world_size: int) -> Any:
    """jax's coordination service, hosted here for `world_size` clients until its `shutdown` is called.

    jax ends clients that still use it at that time, so they should be gone. A recoverable service does not
    kill the ranks when one of them leaves: how a group ends is decided by the launcher and the group's
    server, which know why.
    """
    from jaxlib import _jax

    return _jax.get_distributed_runtime_service(
        address,
        world_size,
        heartbeat_timeout=HEARTBEAT_S,
        shutdown_timeout=SHUTDOWN_S,
        recoverable=True,
    )


def start_distributed(address: str, rank: int, world_size: int, *, served: bool) -> None:
    """Starts `jax.distributed` against `address`; unless `served`, rank 0 hosts the service there itself."""
    import jax

    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_check_proxy_envs", False)  # it warns of what `prepare` has dealt with
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    if served:
        _connect_client(address, rank, world_size)
        return
    jax.distributed.initialize(
        address,
        world_size,
        rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,  # the default would be every interface of the host
        initialization_timeout=START_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
    )


def start_detected() -> None:
    """Starts `jax.distributed` with what jax itself finds out about its cluster."""
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    jax.distributed.initialize()


def _connect_client(address: str, rank: int, world_size: int) -> None:
    """What `jax.distributed.initialize` does, without starting a service in rank 0."""
    from jax._src import distributed
    from jaxlib import _jax

    state = distributed.global_state
    state.coordinator_address, state.process_id, state.num_processes = address, rank, world_size
    state.client = _jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=START_S,
        heartbeat_timeout=HEARTBEAT_S,
        shutdown_timeout=SHUTDOWN_S,
        use_compression=True,
        shutdown_on_destruction=False,
    )
    state.client.connect()


def shut_down_client() -> None:
    """Disconnects from the coordination service; one hosted in this process continues for the others."""
    from jax._src import distributed

    state = distributed.global_state
    if state.client is not None:
        state.client.shutdown()
        state.client = None


def use_gloo_address(address: str, interface: str | None) -> None:
    """Makes gloo listen on `address`, or on `interface` where the user names one.

    By default gloo uses whatever the host's name resolves to, which on many systems is loopback.
    """
    from jax._src import xla_bridge

    module = xla_bridge._jax
    make = getattr(module, "make_gloo_tcp_collectives", None)
    if make is None:
        return
    original = getattr(make, "func", make)  # a second group in one process replaces the first's choice
    where = {"interface": interface} if interface else {"hostname": address}
    module.make_gloo_tcp_collectives = functools.partial(original, **where)


@functools.cache
def shard_putter() -> Callable[..., Any] | None:
    """The function that does `jax.device_put`'s work for host arrays, without 100 Python calls before it.

    (shape of the whole, dtype on the host, sharding, shards, devices) -> the array; None where jaxlib has no
    such function. The dtype is canonicalized, as by `device_put`.
    """
    import jax
    from jaxlib import _jax

    put = getattr(_jax, "batched_device_put", None)
    if put is None:
        return None
    described = functools.lru_cache(maxsize=64)(jax.core.ShapedArray)

    def put_shards(shape: tuple[int, ...], dtype: Any, sharding: Any, shards: list, devices: list) -> Any:
        return put(described(shape, jax.dtypes.canonicalize_dtype(dtype)), sharding, shards, devices, True)

    return put_shards


@functools.cache
def lowering_rule(primitive: Any) -> Callable[..., Any] | None:
    """jax's own lowering rule of `primitive` on CPUs, read at the first call; None if there is none."""
    from jax._src.interpreters import mlir

    of_cpus = getattr(mlir, "_platform_specific_lowerings", {}).get("cpu", {})
    found = of_cpus.get(primitive) or getattr(mlir, "_lowerings", {}).get(primitive)
    return getattr(found, "rule", None)


def program_folder() -> str | None:
    """The user's folder for jax's compiled programs (JAX_COMPILATION_CACHE_DIR); None: nowhere."""
    import jax

    return jax.config.values["jax_compilation_cache_dir"] or None


def coordination_client() -> Any:
    """The client of the coordination service that this process is in; None outside a group."""
    from jax._src import distributed

    return distributed.global_state.client


def keep_programs(store: Any) -> None:
    """Makes jax look for compiled programs in `store` (get(key), put(key, value)) and hand it new ones.

    None: stops this, and jax's own settings apply. jax itself would write only on rank 0, and only programs
    that took a second to compile. A jax without these private names uses its own settings only.
    """
    from jax._src import compilation_cache, compiler

    jaxs_own = getattr(compiler, "_cache_write", None)
    jaxs_own = getattr(jaxs_own, "__wrapped__", jaxs_own)
    if jaxs_own is None or tuple(inspect.signature(jaxs_own).parameters) not in (_WRITE, _WRITE[:-1]):
        return
    if store is not None:
        compilation_cache._cache, compilation_cache._cache_initialized = store, True
        compiler._cache_write = functools.update_wrapper(functools.partial(_keep_program), jaxs_own)
    elif compiler._cache_write is not jaxs_own:
        compilation_cache._cache, compilation_cache._cache_initialized = None, False
        compiler._cache_write = jaxs_own


# From jax 0.11 on without the last: those of a program that is loaded are given to it anew.
_WRITE = ("cache_key", "compile_time_secs", "module_name", "backend", "executable", "host_callbacks")


def _keep_program(
    key: str, compile_s: float, name: str, backend: Any, executable: Any, callbacks: Any = ()
) -> None:
    """In place of jax's `_cache_write`: on every rank, however little time it took to compile."""
    from jax._src import compilation_cache
    from jax.errors import JaxRuntimeError

    if callbacks:  # they are addresses in this process
        return
    try:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(compile_s))
    except JaxRuntimeError as error:  # not every backend can write down every program
        logging.getLogger(__name__).debug("%s is not kept: %s", name, error)
