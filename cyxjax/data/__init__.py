"""Datasets, the order of samples in an epoch, batch plans and loaders."""

from cyxjax.data.batches import BatchPlan, HostBatch, batch_size_from_global, iterate, read_batch
from cyxjax.data.catalog import load_dataset
from cyxjax.data.loader import DataLoader, prefetch
from cyxjax.data.order import Order
from cyxjax.data.sources import ArrayDataset, Dataset, Mixture, as_batches, as_dataset
from cyxjax.data.splits import DatasetInfo, Splits
from cyxjax.data.streams import Batches, Rows
from cyxjax.data.tar_shards import TarShards
from cyxjax.data.text import Packed, pack

__all__ = [
    "ArrayDataset",
    "BatchPlan",
    "Batches",
    "DataLoader",
    "Dataset",
    "DatasetInfo",
    "HostBatch",
    "Mixture",
    "Order",
    "Packed",
    "Rows",
    "Splits",
    "TarShards",
    "as_batches",
    "as_dataset",
    "batch_size_from_global",
    "iterate",
    "load_dataset",
    "pack",
    "prefetch",
    "read_batch",
]
