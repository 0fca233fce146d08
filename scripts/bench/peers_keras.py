"""Keras 3 on JAX, the process of peers.py: `fit` with its progress and history.

Two replicas are two devices of this one process under `keras.distribution.DataParallel`.
"""

import contextlib
import os
import sys
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
from peers_work import (
    CLASSES,
    CONTEXT,
    DENSE,
    FEATURES,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    WIDTH,
    WORKS,
    data,
    say,
    steps_of,
    task,
)  # fmt: skip


def model(work: str):
    import keras
    from keras import layers as ks

    class Places(ks.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(CONTEXT, WIDTH), initializer="uniform")

        def call(self, x):
            return x + self.table

    if work == "gpt":
        tokens = keras.Input((CONTEXT,), dtype="int32")
        x = Places()(ks.Embedding(VOCABULARY, WIDTH)(tokens))
        for _ in range(LAYERS):
            seen = ks.LayerNormalization(epsilon=1e-5)(x)
            x = x + ks.MultiHeadAttention(HEADS, WIDTH // HEADS)(seen, seen, use_causal_mask=True)
            up = ks.Dense(4 * WIDTH, activation="gelu")(ks.LayerNormalization(epsilon=1e-5)(x))
            x = x + ks.Dense(WIDTH)(up)
        return keras.Model(
            tokens, ks.Dense(VOCABULARY, use_bias=False)(ks.LayerNormalization(epsilon=1e-5)(x))
        )
    if work == "cnn":
        parts = [keras.Input((28, 28, 1))]
        for features in FEATURES:
            parts += [ks.Conv2D(features, 3, padding="same", activation="relu"), ks.MaxPooling2D(2)]
        parts += [ks.Flatten(), ks.Dense(DENSE, activation="relu")]
    else:
        parts = [keras.Input((784,)), *(ks.Dense(size, activation="relu") for size in HIDDEN[work])]
    return keras.Sequential([*parts, ks.Dense(CLASSES)])


def main() -> None:
    args = task()
    jax.config.update("jax_num_cpu_devices", args.replicas)
    import keras

    if args.replicas > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    batch, (x, y) = WORKS[args.work].batch * args.replicas, data(args.work)
    net = model(args.work)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile("adam", loss, metrics=["accuracy"])

    def run(steps: int) -> float:
        start = time.perf_counter()
        done, per_epoch = 0, len(x) // batch
        while done < steps:
            count = min(per_epoch, steps - done)
            net.fit(x[: count * batch], y[: count * batch], batch_size=batch, shuffle=True, verbose=2)
            done += count
        return time.perf_counter() - start

    with contextlib.redirect_stdout(sys.stderr):
        run(3)
        seconds = run(steps_of(args))
    say(args, seconds)


if __name__ == "__main__":
    main()
