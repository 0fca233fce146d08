"""The process of peers.py for Keras 3 on JAX: `fit` with its progress output and history.

Two replicas are two devices of this one process under `keras.distribution.DataParallel`.
"""

import contextlib
import os
import sys
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import peers_work as sizes
from peers_work import WORKS, data, say, steps_of, task


def model(work: str):
    import keras
    from keras import layers as ks

    if work in sizes.TEXTS:
        return gpt(keras, sizes.TEXTS[work])
    if work == "resnet18":
        return resnet(keras)
    if work in sizes.DENSE:
        parts = [keras.Input(sizes.IMAGES[work])]
        for features in sizes.FEATURES:
            parts += [ks.Conv2D(features, 3, padding="same", activation="relu"), ks.MaxPooling2D(2)]
        parts += [ks.Flatten(), ks.Dense(sizes.DENSE[work], activation="relu")]
    else:
        parts = [keras.Input((784,)), *(ks.Dense(size, activation="relu") for size in sizes.HIDDEN[work])]
    return keras.Sequential([*parts, ks.Dense(sizes.CLASSES)])


def gpt(keras, size):
    ks = keras.layers

    class Places(ks.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(size.context, size.width), initializer="uniform")

        def call(self, x):
            return x + self.table

    tokens = keras.Input((size.context,), dtype="int32")
    x = Places()(ks.Embedding(size.vocabulary, size.width)(tokens))
    for _ in range(size.layers):
        seen = ks.LayerNormalization(epsilon=1e-5)(x)
        x = x + ks.MultiHeadAttention(size.heads, size.width // size.heads)(seen, seen, use_causal_mask=True)
        up = ks.Dense(4 * size.width, activation="gelu")(ks.LayerNormalization(epsilon=1e-5)(x))
        x = x + ks.Dense(size.width)(up)
    head = ks.Dense(size.vocabulary, use_bias=False)
    return keras.Model(tokens, head(ks.LayerNormalization(epsilon=1e-5)(x)))


def resnet(keras):
    ks = keras.layers

    def norm(x):
        return ks.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)

    def conv(x, features, size, stride=1):
        return norm(ks.Conv2D(features, size, stride, padding="same", use_bias=False)(x))

    images = keras.Input(sizes.IMAGES["resnet18"])
    x = ks.ReLU()(conv(images, sizes.STAGES[0], 3))
    for stage, features in enumerate(sizes.STAGES):
        for stride in (2 if stage else 1, 1):
            y = conv(ks.ReLU()(conv(x, features, 3, stride)), features, 3)
            x = ks.ReLU()(y + (x if x.shape == y.shape else conv(x, features, 1, stride)))
    return keras.Model(images, ks.Dense(sizes.CLASSES)(ks.GlobalAveragePooling2D()(x)))


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
