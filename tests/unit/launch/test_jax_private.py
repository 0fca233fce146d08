"""The contract with private names of jax: changes that a new jax could make without an error."""

import inspect
import socket
from types import SimpleNamespace

import jax
import pytest
from jax import lax
from jax._src import compilation_cache, compiler, distributed, xla_bridge

from cyxjax.errors import GroupError
from cyxjax.launch.backend import jax_private
from cyxjax.launch.group import ports


def test_names_without_which_another_way_is_taken_silently_are_there():
    assert jax_private.can_serve()
    assert jax_private.shard_putter() is not None
    for primitive in (lax.conv_general_dilated_p, lax.select_and_scatter_add_p):
        assert jax_private.lowering_rule(primitive) is not None


def test_our_client_is_what_jax_itself_would_make():
    source = inspect.getsource(distributed.State.initialize)
    for used in ("get_distributed_runtime_client", "use_compression=True"):
        assert used in source


def test_a_service_listens_on_the_reserved_port_of_its_address_and_on_no_other():
    held, port = ports.reserve("127.0.0.2")
    with held:
        with pytest.raises(GroupError, match=r"Port \d+ .*127\.0\.0\.2 .*MASTER_PORT"):
            ports.listen("127.0.0.2", port)
        with pytest.raises(ConnectionRefusedError):  # what holds the port does not listen
            socket.create_connection(("127.0.0.2", port), timeout=5)
        service = jax_private.serve(f"127.0.0.2:{port}", 1)
        try:
            socket.create_connection(("127.0.0.2", port), timeout=5).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=5)
        finally:
            service.shutdown()


def test_a_started_backend_is_refused_with_the_way_out():
    assert jax.devices()
    with pytest.raises(GroupError, match=r"devices .*cyxjax\.distributed\.init\(\)"):
        jax_private.refuse_started_backend("a group")


def test_gloo_is_given_one_address_even_after_a_second_choice(monkeypatch):
    monkeypatch.setattr(xla_bridge._jax, "make_gloo_tcp_collectives", lambda **where: where)
    jax_private.use_gloo_address("10.0.0.1", None)
    jax_private.use_gloo_address("10.0.0.2", None)
    assert xla_bridge._jax.make_gloo_tcp_collectives(distributed_client=1) == {
        "distributed_client": 1,
        "hostname": "10.0.0.2",
    }
    jax_private.use_gloo_address("10.0.0.2", "eth7")
    assert xla_bridge._jax.make_gloo_tcp_collectives() == {"interface": "eth7"}


def test_jax_asks_the_store_and_hands_it_what_it_compiled(monkeypatch):
    jaxs_own, box = inspect.unwrap(compiler._cache_write), {}
    store = SimpleNamespace(get=box.get, put=box.__setitem__, _path="memory")
    forms = (jax_private._WRITE, jax_private._WRITE[:-1])  # jax 0.10 and 0.11
    assert tuple(inspect.signature(jaxs_own).parameters) in forms
    monkeypatch.setattr(compilation_cache, "_cache", None)  # the cache of the tests; restored at the end
    monkeypatch.setattr(compilation_cache, "_cache_initialized", False)
    monkeypatch.setattr(compiler, "_cache_write", jaxs_own)
    monkeypatch.setattr(distributed.global_state, "process_id", 1)  # jax itself writes on rank 0 alone

    def compiled():
        return jax.jit(lambda x: x * 3 + 1).lower(1.0).compile()

    jax_private.keep_programs(store)
    jax_private.keep_programs(store)  # a second group in one process
    assert compiled()(2.0) == 7
    assert [name for name in box if name.startswith("jit__lambda-")]
    written = set(box)
    assert compiled()(2.0) == 7
    assert set(box) == written
    jax_private.keep_programs(None)
    assert compilation_cache._cache is None
    assert compiler._cache_write is jaxs_own
