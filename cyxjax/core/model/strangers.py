"""What is given as a model and is none: one line that names the way in from there."""

from typing import Any

from cyxjax.errors import ConfigError

_PAIR = "pass (init, apply) with init(key, inputs) -> params and apply(params, inputs) -> output"
_BY_LIBRARY = {
    "equinox": "params, static = eqx.partition(model, eqx.is_inexact_array), then pass (params, lambda p, x: "
    "jax.vmap(eqx.combine(p, static))(x))",
    "haiku": "pass hk.transform(lambda x: Net()(x)), or hk.transform_with_state",
    "torch": "write it as a flax.nnx or flax.linen module; init_from reads its state_dict",
    "keras": "write it as a flax.nnx or flax.linen module; Keras on its jax backend trains itself",
    "tensorflow": "write it as a flax.nnx or flax.linen module",
    "sklearn": "cx.get_model('mlp')(num_classes=...) is a network; scikit-learn fits its own",
}


def refuse(model: Any) -> ConfigError:
    """What to raise for `model`, which no adapter takes."""
    name, way = _said(model)
    return ConfigError(
        f"{name} is not a model cyxjax knows; expected a flax.linen or flax.nnx Module, a pair (init, apply) "
        f"or a cx.SequentialModel. HINT: {way}."
    )


def _said(model: Any) -> tuple[str, str]:
    """(what it is, what to do)."""
    if isinstance(model, type):
        return f"the class {model.__name__}", _of_class(model)
    kind = type(model)
    if isinstance(model, str):
        return repr(model), f"cx.get_model({model!r})() makes a network by its name"
    if hasattr(model, "init") and hasattr(model, "update") and not hasattr(model, "apply"):
        return "an optimizer", "the order is DistributedTrainer(model, loss, optimizer)"
    if hasattr(model, "apply_fn") and hasattr(model, "tx"):
        return (
            kind.__name__,
            "pass the module itself and its tx as the optimizer: the trainer keeps the state",
        )
    if _libraries(kind) & {"flax"}:
        return f"a {kind.__name__} of Flax", "pass the module itself"
    if isinstance(model, tuple | list) and any(_libraries(type(one)) & {"flax"} for one in model):
        return f"a {kind.__name__} of Flax's parts", "pass the module itself, not what nnx.split made of it"
    way = next((_BY_LIBRARY[name] for name in _libraries(kind) if name in _BY_LIBRARY), "")
    if way:
        return kind.__name__, way
    if callable(model):
        named = getattr(model, "__name__", kind.__name__)
        return f"the function {named}", f"{_PAIR}, or (params, {named}) with values to begin with"
    return kind.__name__, f"for other libraries {_PAIR}"


def _of_class(model: type) -> str:
    libraries = _libraries(model)
    if "flax" in libraries and hasattr(model, "iter_modules"):
        return f"make it, {model.__name__}(..., rngs=nnx.Rngs(0))"
    way = next((_BY_LIBRARY[name] for name in libraries if name in _BY_LIBRARY), "")
    return f"make it first; then {way}" if way else f"make it, {model.__name__}(...)"


def _libraries(kind: type) -> set[str]:
    """The packages that `kind` and what it inherits from are of."""
    return {one.__module__.partition(".")[0] for one in kind.__mro__}
