"""Which samples, when: sources, the order of an epoch, batch plans, loaders."""

from cyxjax.data.batches import BatchPlan, HostBatch, batch_size_from_global, iterate, read_batch
from cyxjax.data.catalog import load_dataset
from cyxjax.data.loader import DataLoader
from cyxjax.data.order import Order
from cyxjax.data.prefetch import prefetch
from cyxjax.data.sources import ArrayDataset, Dataset, as_batches, as_dataset
from cyxjax.data.splits import DatasetInfo, Splits

__all__ = [
    "ArrayDataset",
    "BatchPlan",
    "DataLoader",
    "Dataset",
    "DatasetInfo",
    "HostBatch",
    "Order",
    "Splits",
    "as_batches",
    "as_dataset",
    "batch_size_from_global",
    "iterate",
    "load_dataset",
    "prefetch",
    "read_batch",
]
