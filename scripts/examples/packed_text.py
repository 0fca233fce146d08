"""A language model on texts of different lengths, packed into rows; attention stays within each text.

python scripts/examples/packed_text.py    (also under the launcher, with the same losses)
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import cyxjax as cx
from cyxjax.data.text import python_help

LENGTH, WIDTH = 48, 32


class Model(linen.Module):
    """One transformer block; its arguments are the inputs of a packed dataset, in their order."""

    vocabulary: int

    @linen.compact
    def __call__(self, tokens, segments, positions):
        x = linen.Embed(self.vocabulary, WIDTH)(tokens) + linen.Embed(LENGTH, WIDTH)(positions)
        same = segments[:, :, None] == segments[:, None, :]  # the same text
        mask = linen.combine_masks(linen.make_causal_mask(tokens), same[:, None].astype(jnp.float32))
        x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x), mask=mask)
        x = x + linen.Dense(WIDTH)(jax.nn.gelu(linen.Dense(4 * WIDTH)(linen.LayerNorm()(x))))
        return linen.Dense(self.vocabulary)(linen.LayerNorm()(x))


def main(epochs=2, texts=120):
    text = python_help()[:20000]
    vocabulary = {character: token for token, character in enumerate(sorted(set(text)))}
    sentences = [part.strip() for part in re.split(r"\n\n|\. ", text) if part.strip()][:texts]
    tokens = [np.array([vocabulary[character] for character in part], np.int32) for part in sentences]
    packed = cx.data.pack(tokens, LENGTH)
    loss = cx.CrossEntropyLoss(ignore_index=-100)  # the target of padding
    trainer = cx.distributed.DistributedTrainer(Model(len(vocabulary)), loss, cx.SGDOptimizer(0.5))
    config = cx.distributed.DistributedTrainingConfig(
        epochs=epochs, global_batch_size=16, max_grad_norm=1.0, checkpoint_every_n_epochs=0
    )
    return trainer.fit(packed, config).train_losses


if __name__ == "__main__":
    print("losses:", [round(loss, 4) for loss in main()])
