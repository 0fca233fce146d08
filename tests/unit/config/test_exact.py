"""Settings that an exact run refuses by name before compilation, each with an alternative."""

import pytest

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.errors import ConfigError
from cyxjax.sync.registry import STRATEGIES


def exact(**options):
    return DistributedTrainingConfig(
        **{"reproducibility": "exact", "global_batch_size": 64, "virtual_replicas": 8} | options
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": None}, "global_batch_size: .*batch_size"),
        ({"global_batch_size": 60}, "global_batch_size = 60"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps = 2"),
        *(({"comm": name}, f"comm = 'mean' .*'{name}'") for name in STRATEGIES if name != "mean"),
        ({"sync_batchnorm": True}, "sync_batchnorm.* virtual_replicas"),
        ({"virtual_replicas": 0}, "virtual_replicas = 0"),
        ({"offload": "optimizer"}, "reproducibility = 'exact' .*offload = 'optimizer'"),
    ],
)
def test_what_cannot_be_exact_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        exact(**options)


def test_threads_follow_the_virtual_replicas_unless_named():
    # a number that does not depend on the machine or its load: threads determine the bits
    assert exact().pool_threads == 8
    assert exact(exact_threads=4).pool_threads == 4
    assert DistributedTrainingConfig(exact_threads=4).pool_threads is None
