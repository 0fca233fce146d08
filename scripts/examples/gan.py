"""A GAN on handwritten digits: two optimizers over two groups of parameters, in one compiled step.

python scripts/examples/gan.py    (also under the launcher, with the same losses)
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen

import cyxjax as cx


class Generator(linen.Module):
    @linen.compact
    def __call__(self, noise):
        h = linen.relu(linen.Dense(64)(noise))
        return linen.sigmoid(linen.Dense(64)(h))


class Discriminator(linen.Module):
    @linen.compact
    def __call__(self, pixels):
        h = linen.leaky_relu(linen.Dense(64)(pixels), 0.2)
        return linen.Dense(1)(h)[:, 0]


class Gan(linen.Module):
    """Generator and discriminator; the output has everything that the losses need."""

    def setup(self):
        self.generator, self.discriminator = Generator(), Discriminator()

    def __call__(self, pixels):
        made = self.generator(jax.random.normal(self.make_rng("noise"), (len(pixels), 8)))
        return {"real": self.discriminator(pixels), "fake": self.discriminator(made), "made": made}


def fools(output, target):
    return jax.nn.softplus(-output["fake"])


def tells(output, target):
    return jax.nn.softplus(-output["real"]) + jax.nn.softplus(output["fake"])


def task(typical):
    """Each loss trains its own network; `gap` is the mean squared difference of fakes to `typical`."""
    adam = lambda lr: optax.adam(lr, b1=0.5)  # noqa: E731
    return cx.Task(
        {
            "fools": cx.Term(fools, trains="generator/*", optimizer=adam(2e-3)),
            "tells": cx.Term(tells, trains="discriminator/*", optimizer=adam(1e-3), every=2),
        },
        metrics={"gap": lambda output, target: jnp.square(output["made"] - typical).mean(1)},
    )


def main(epochs=4):
    digits, _ = cx.load_dataset("digits").train.take(range(512))
    pixels = digits.reshape(len(digits), -1)
    trainer = cx.distributed.DistributedTrainer(Gan(), task(pixels.mean(0)))
    config = cx.distributed.DistributedTrainingConfig(
        epochs=epochs, global_batch_size=32, checkpoint_every_n_epochs=0
    )
    return trainer.fit(pixels, pixels, config).metrics["train_gap"]


if __name__ == "__main__":
    print("distance to a typical digit:", [round(gap, 4) for gap in main(20)])
